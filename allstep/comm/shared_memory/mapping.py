"""Maps the same memory in several ranks.

[Note: nameless memory] The first rank makes a file in memory without a name (memfd), and the
others open it through /proc while that rank holds it open. It is never listed in /dev/shm, so
there is nothing to unlink, nothing that a process could leave behind if it is killed, and
/dev/shm's size is no limit: the kernel frees the memory with its last mapping.
"""

import logging
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from allstep.comm.agreement import agree
from allstep.comm.group import WorkerGroup
from allstep.comm.missing import RankNames
from allstep.comm.places import own_space
from allstep.device import is_accelerator


class NotShared(Exception):  # noqa: N818 (a finding, not a failure)
    """The ranks cannot share memory; the message says why, the same on every rank."""

    def tell(self, rank: int, instead: str) -> None:
        """Logs on the first rank what is done instead, and why."""
        if rank == 0:
            logging.getLogger("allstep").warning("%s: %s", instead, self)


class Wakeups:
    """One pipe per rank, into which the other ranks write to wake it.

    Attributes:
        read_fd, write_fd: the two ends of this rank's pipe.
        pidfds: descriptor to poll for the end of another rank's process -> that rank.
    """

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.pidfds: dict[int, int] = {}
        self._write_fds: dict[int, int] = {}

    def connect(self, rank: int, pid: int, write_fd: int) -> None:
        """Opens the writing end of a rank's pipe, and watches the rank's process."""
        if pid != os.getpid():
            self.pidfds[os.pidfd_open(pid)] = rank
        self._write_fds[rank] = os.open(
            f"/proc/{pid}/fd/{write_fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )

    def wake(self, rank: int) -> None:
        """Wakes a rank."""
        with suppress(BlockingIOError, BrokenPipeError):  # a full pipe wakes it too; or it is gone
            os.write(self._write_fds[rank], b"!")

    def clear(self) -> None:
        """Empties this rank's pipe."""
        with suppress(BlockingIOError):
            os.read(self.read_fd, 1 << 12)

    def __del__(self) -> None:
        """Closes all descriptors; not earlier, as a thread may wait when the buffer is closed."""
        for fd in (self.read_fd, self.write_fd, *self.pidfds, *self._write_fds.values()):
            os.close(fd)


@dataclass(frozen=True)
class SharedMapping:
    """The memory that ranks share, and the pipes that wake them.

    Attributes:
        memory: the memory, the same for all ranks; zeros at first.
        pids: the pid of each rank's process.
        wakeups: the ranks' pipes.
        names: names of the ranks, for errors.
    """

    memory: mmap.mmap
    pids: tuple[int, ...]
    wakeups: Wakeups
    names: RankNames


def map_shared(comm: WorkerGroup, num_bytes: int, *, populate: bool = True) -> SharedMapping:
    """Maps memory that all ranks of `comm` share, and connects their pipes. Collective.

    Args:
        comm: the ranks.
        num_bytes: size of the memory, the same on all ranks.
        populate: whether to map all pages now, rather than each at its first use.

    Raises:
        NotShared: on every rank, if one of them cannot share memory.
        DisagreementError: on every rank, if the sizes differ.
    """
    memory = share_memory(comm, num_bytes, populate=populate)
    comm.wire.names.withdraw_report()
    wakeups = Wakeups()
    entries = comm.all_gather_object((os.getpid(), wakeups.write_fd))
    _check_all(comm, _connect(wakeups, entries))
    return SharedMapping(memory, tuple(pid for pid, _ in entries), wakeups, comm.wire.names)


def share_memory(comm: WorkerGroup, num_bytes: int, *, populate: bool = True) -> mmap.mmap:
    """Maps the same memory, of zeros, on all ranks of `comm`. Collective; see `map_shared`.

    Raises:
        NotShared: on every rank, if one of them cannot share memory.
        DisagreementError: on every rank, if the sizes differ.
    """
    first = comm.wire.names.numbers[0]
    fd, trouble = _make(num_bytes) if comm.rank == 0 else (-1, "")
    try:
        agree(comm, f"share {num_bytes} bytes of memory")  # or ranks would use different offsets
        entries = comm.all_gather_object((_host(comm), os.getpid(), fd, trouble))
        hosts, pids, fds, troubles = zip(*entries, strict=True)
        if troubles[0]:
            raise NotShared(troubles[0])
        for rank, host in enumerate(hosts):
            if host != hosts[0]:
                other = comm.wire.names.numbers[rank]
                raise NotShared(f"ranks {first} and {other} are not CPU ranks of one host")
        memory, trouble = _map(pids[0], fds[0], num_bytes, populate)
        _check_all(comm, trouble)
    finally:
        if fd >= 0:
            os.close(fd)
    assert memory is not None
    return memory


def _check_all(comm: WorkerGroup, trouble: str) -> None:
    """Raises on every rank if one of them reports a problem."""
    for rank, other in enumerate(comm.all_gather_object(trouble)):
        if other:
            named = comm.wire.names.named(rank)
            raise NotShared(f"{named} cannot map memory of another: {other}")


def _host(comm: WorkerGroup) -> tuple[str, int, str]:
    """A value that is equal on CPU ranks that can see each other's processes."""
    return (
        own_space() or f"no /proc on rank {comm.rank}",
        comm.node_rank,
        comm.device.type if not is_accelerator(comm.device) else f"device of rank {comm.rank}",
    )


def _make(num_bytes: int) -> tuple[int, str]:
    """Makes the file; returns its descriptor and an error's text.

    Its pages are allocated now: if memory were full, a later write would kill the process.
    """
    fd = -1
    try:
        fd = os.memfd_create("allstep", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, num_bytes)
    except (OSError, AttributeError) as error:
        if fd >= 0:
            os.close(fd)
        return -1, f"no {num_bytes >> 20} MiB of memory to share ({error})"
    return fd, ""


def _map(pid: int, fd: int, num_bytes: int, populate: bool) -> tuple[mmap.mmap | None, str]:
    """Maps the first rank's file; returns the mapping, or None, and an error's text."""
    own = -1
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        return mmap.mmap(own, num_bytes, flags=flags), ""
    except (OSError, ValueError, AttributeError) as error:
        return None, str(error)
    finally:
        if own >= 0:
            os.close(own)


def _connect(wakeups: Wakeups, entries: Sequence[tuple[int, int]]) -> str:
    """Opens the pipes of all ranks; returns an error's text, empty if all went well."""
    try:
        for rank, (pid, write_fd) in enumerate(entries):
            wakeups.connect(rank, pid, write_fd)
    except (OSError, AttributeError) as error:
        return str(error)
    return ""
