"""How ranks come to map the same memory.

[Note: nameless memory] The first rank makes a file in memory without a name (memfd), and the
others open it through /proc while that rank holds it open. It never stands in /dev/shm, so
there is nothing to unlink, nothing that a process killed at any moment could leave behind, and
no limit of /dev/shm's size: the kernel frees it with its last mapping.
"""

import logging
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from allstep.comm.agreement import agree
from allstep.comm.group import WorkerGroup
from allstep.comm.roster import Roster

__all__ = ["Bells", "Meeting", "NotShared", "meet", "share_memory"]


class NotShared(Exception):  # noqa: N818 (a finding, not a failure)
    """The ranks cannot share memory; the message says why, the same on every rank."""

    def tell(self, rank: int, instead: str) -> None:
        """Says on the first rank what is done instead, and why."""
        if rank == 0:
            logging.getLogger("allstep").warning("%s: %s", instead, self)


class Bells:
    """A pipe for each rank, into which the others write to wake it.

    Attributes:
        own: the end of this rank's pipe to read from.
        rope: the other end.
        pidfds: what can be polled for the end of another rank's process -> that rank.
    """

    def __init__(self) -> None:
        self.own, self.rope = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.pidfds: dict[int, int] = {}
        self._ropes: dict[int, int] = {}

    def tie(self, rank: int, pid: int, rope: int) -> None:
        """Opens the end of a rank's pipe to write to, and watches its process."""
        if pid != os.getpid():
            self.pidfds[os.pidfd_open(pid)] = rank
        self._ropes[rank] = os.open(
            f"/proc/{pid}/fd/{rope}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )

    def ring(self, rank: int) -> None:
        """Wakes a rank up."""
        with suppress(BlockingIOError, BrokenPipeError):  # it rings already; nobody is there
            os.write(self._ropes[rank], b"!")

    def silence(self) -> None:
        """Takes what the others have rung."""
        with suppress(BlockingIOError):
            os.read(self.own, 1 << 12)

    def __del__(self) -> None:
        """Only with the last reference: a thread may still wait when the segment is closed."""
        for fd in (self.own, self.rope, *self.pidfds, *self._ropes.values()):
            os.close(fd)


@dataclass(frozen=True)
class Meeting:
    """The memory that ranks have met in.

    Attributes:
        memory: the same for all of them, zero at first.
        pids: each rank's process.
        bells: to wake ranks with.
        roster: what errors call them.
    """

    memory: mmap.mmap
    pids: tuple[int, ...]
    bells: Bells
    roster: Roster


def meet(comm: WorkerGroup, num_bytes: int, *, populate: bool = True) -> Meeting:
    """Maps memory that all ranks of `comm` share, and ties the bells. Collective.

    Args:
        comm: the ranks.
        num_bytes: how much, the same on all.
        populate: whether all pages are mapped now, or each when it is first used.

    Raises:
        NotShared: on every rank, if one of them cannot.
        DisagreementError: on every rank, if they want different sizes.
    """
    memory = share_memory(comm, num_bytes, populate=populate)
    comm.wire.roster.take_word_back()
    bells = Bells()
    pids, ropes = zip(*comm.all_gather_object((os.getpid(), bells.rope)), strict=True)
    _check_all(comm, _tie(bells, pids, ropes))
    return Meeting(memory, pids, bells, comm.wire.roster)


def share_memory(comm: WorkerGroup, num_bytes: int, *, populate: bool = True) -> mmap.mmap:
    """Maps the same memory on all ranks of `comm`, zero at first. Collective; see `meet`.

    Raises:
        NotShared: on every rank, if one of them cannot.
        DisagreementError: on every rank, if they want different sizes.
    """
    first = comm.wire.roster.numbers[0]
    fd, trouble = _make(num_bytes) if comm.rank == 0 else (-1, "")
    try:
        agree(comm, f"share {num_bytes} bytes of memory")  # else they would see other places of it
        entries = comm.all_gather_object((_host(comm), os.getpid(), fd, trouble))
        hosts, pids, fds, troubles = zip(*entries, strict=True)
        if troubles[0]:
            raise NotShared(troubles[0])
        for rank, host in enumerate(hosts):
            if host != hosts[0]:
                other = comm.wire.roster.numbers[rank]
                raise NotShared(f"ranks {first} and {other} are not CPU ranks of one host")
        memory, trouble = _map(pids[0], fds[0], num_bytes, populate)
        _check_all(comm, trouble)
    finally:
        if fd >= 0:
            os.close(fd)
    assert memory is not None
    return memory


def _check_all(comm: WorkerGroup, trouble: str) -> None:
    """Raises on every rank if one of them has trouble."""
    for rank, other in enumerate(comm.all_gather_object(trouble)):
        if other:
            named = comm.wire.roster.named(rank)
            raise NotShared(f"{named} cannot map memory of another: {other}")


def _host(comm: WorkerGroup) -> tuple[str, str, int, str]:
    """Equal on ranks that can see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = "/proc/self/ns/pid"
    return (
        boot.read_text() if boot.exists() else f"no /proc on rank {comm.rank}",
        os.readlink(space) if os.path.exists(space) else "",
        comm.node_rank,
        comm.device.type if comm.device.type == "cpu" else f"device of rank {comm.rank}",
    )


def _make(num_bytes: int) -> tuple[int, str]:
    """The file's descriptor, or what went wrong. Its pages are there before they are used:
    a full memory would end the process at some later write.
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
    """The mapping, or what went wrong."""
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


def _tie(bells: Bells, pids: Sequence[int], ropes: Sequence[int]) -> str:
    """Ties the bells of all ranks; returns what went wrong."""
    try:
        for rank, (pid, rope) in enumerate(zip(pids, ropes, strict=True)):
            bells.tie(rank, pid, rope)
    except (OSError, AttributeError) as error:
        return str(error)
    return ""
