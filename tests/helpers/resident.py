"""Resident memory of a process that trains."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import psutil

Step = Callable[[], None]

_M_MMAP_THRESHOLD = -3


def peak_bytes(make_small: Callable[[], Step], make: Callable[[], Step]) -> int:
    """Of a training's second step, above what the process had before there was a model.

    Args:
        make_small: makes a small model of the same kind, and returns a step of it, which loads
            what any step loads and keeps.
        make: makes the model.
    """
    # What is freed is given back at once.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    make_small()()
    before = psutil.Process().memory_info().rss
    step = make()
    step()  # makes the optimizer's state
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    step()
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) * 1024 - before
