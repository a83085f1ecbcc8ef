"""How ranks come to map the same memory.

[Note: nameless memory] The first rank makes a file in memory without a name (memfd), and the
others open it through /proc while that rank holds it open. It never stands in /dev/shm, so
there is nothing to unlink, nothing that a process killed at any moment could leave behind, and
no limit of /dev/shm's size: the kernel frees it with its last mapping.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allstep.comm.communicator import Communicator

__all__ = ["Meeting", "NotShared", "meet"]


class NotShared(Exception):  # noqa: N818 (a finding, not a failure)
    """The ranks cannot share memory; the message says why, the same on every rank."""


@dataclass(frozen=True)
class Meeting:
    """The memory that ranks have met in.

    Attributes:
        memory: the same for all of them, zero at first.
        pids: each rank's process.
    """

    memory: mmap.mmap
    pids: tuple[int, ...]


def meet(comm: "Communicator", num_bytes: int) -> Meeting:
    """Maps memory that all ranks of `comm` share. Collective.

    Raises:
        NotShared: on every rank, if one of them cannot.
    """
    fd, trouble = _make(num_bytes) if comm.rank == 0 else (-1, "")
    try:
        entries = comm.all_gather_object((_host(comm), os.getpid(), fd, trouble))
        hosts, pids, fds, troubles = zip(*entries, strict=True)
        if troubles[0]:
            raise NotShared(troubles[0])
        for rank, host in enumerate(hosts):
            if host != hosts[0]:
                raise NotShared(f"ranks 0 and {rank} are not CPU ranks of one host")
        memory, trouble = _map(pids[0], fds[0], num_bytes)
        for rank, other in enumerate(comm.all_gather_object(trouble)):
            if other:
                raise NotShared(f"rank {rank} cannot map memory of rank 0: {other}")
    finally:
        if fd >= 0:
            os.close(fd)
    assert memory is not None
    return Meeting(memory, pids)


def _host(comm: "Communicator") -> tuple[str, str, int, str]:
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


def _map(pid: int, fd: int, num_bytes: int) -> tuple[mmap.mmap | None, str]:
    """The mapping, or what went wrong."""
    own = -1
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        os.close(os.pidfd_open(pid))
        return mmap.mmap(own, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), ""
    except (OSError, AttributeError) as error:
        return None, str(error)
    finally:
        if own >= 0:
            os.close(own)
