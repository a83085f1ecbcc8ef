"""Resident memory of a process that trains."""

import ctypes
from collections.abc import Callable
from pathlib import Path

from allstep import Communicator

Step = Callable[[], None]

_M_MMAP_THRESHOLD = -3


def peak_bytes(comm: Communicator, make_small: Callable[[], Step], make: Callable[[], Step]) -> int:
    """Of a training's second step, above what the process had before there was a model.

    Memory that workers share is counted in equal parts, so that the workers' numbers add up to
    what their machine needs.

    Args:
        comm: the workers, each of which calls this.
        make_small: makes a small model of the same kind, and returns a step of it, which loads
            what any step loads and keeps.
        make: makes the model.
    """
    # What is freed is given back at once.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    make_small()()
    comm.barrier()
    before = _resident_bytes("VmRSS")
    comm.barrier()
    step = make()
    step()  # makes the optimizer's state
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    step()
    comm.barrier()  # all have what they share
    peak = _resident_bytes("VmHWM")
    comm.barrier()
    return peak - before


def _resident_bytes(key: str) -> int:
    """By a key of the process's status, less what others have of the memory that it shares."""
    status = Path("/proc/self/status").read_text().split()
    of_all, of_this = _bytes_of(status, key), Path("/proc/self/smaps_rollup").read_text().split()
    return of_all - _bytes_of(status, "RssShmem") + _bytes_of(of_this, "Pss_Shmem")


def _bytes_of(words: list[str], key: str) -> int:
    return int(words[words.index(f"{key}:") + 1]) * 1024
