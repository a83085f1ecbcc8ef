"""Clocks of one worker, and times that several workers agree on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from timeit import timeit

import torch

from allstep.comm import Communicator
from allstep.device import current_stream, has_streams

_MOST_REPEATS = 256
_THREADS = Path("/proc/self/task")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The amount and duration of measurements; by default enough for the planner, in a minute.

    Attributes:
        bucket_sizes_bytes: of the buckets that are exchanged, in float32; growing.
        message_sizes_bytes: of the messages between two workers; growing.
        copy_bytes: of what is copied in memory.
        matrix_size: rows and columns of the matrices that a CPU multiplies: large enough to be
            bound by arithmetic.
        batch_s: about how long one timing takes.
        pause_s: before an exchange that is timed after a pause.
        num_rounds: how often each exchange is timed.
    """

    bucket_sizes_bytes: tuple[int, ...] = tuple(1 << n for n in (12, 16, 18, 20, 21, 22, 23, 25))
    message_sizes_bytes: tuple[int, ...] = tuple(1 << n for n in (14, 16, 18, 20, 22))
    copy_bytes: int = 32 << 20
    matrix_size: int = 1024
    batch_s: float = 0.06
    pause_s: float = 0.03
    num_rounds: int = 5


USUAL_EFFORT = Effort()


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has finished the present stream."""
    if has_streams(device):
        current_stream(device).synchronize()


def now_s(device: torch.device) -> float:
    """The time after a GPU has finished the present stream."""
    synchronize(device)
    return perf_counter()


def runnable_s() -> float:
    """The seconds in which this process's threads have used or waited for a core, added up.

    Where several workers share a core, each uses it for a part of the time in which it needs it.
    Only Linux tells who waits.
    """
    waited_ns = 0
    for thread in _THREADS.glob("*/schedstat"):
        try:
            _, thread_waited_ns, _ = thread.read_text().split()
        except (OSError, ValueError):  # the thread is gone, or the system doesn't count
            continue
        waited_ns += int(thread_waited_ns)
    return process_time() + 1e-9 * waited_ns


def slowest_s(comm: Communicator, seconds: float) -> float:
    """The slowest worker's seconds, on all of them. Collective."""
    own = torch.tensor(seconds, dtype=torch.float64)
    return float(comm.all_reduce(own, "max").item())


def mean_s(comm: Communicator, seconds: float) -> float:
    """The mean of the workers' seconds, on all of them. Collective."""
    own = torch.tensor(seconds, dtype=torch.float64)
    return float(comm.all_reduce(own, "mean"))


def agreed_repeats(comm: Communicator, work: Callable[[], object], seconds: float) -> int:
    """The number of repeats that take about a given time, equal on all workers. Collective."""
    once_s = slowest_s(comm, timeit(work, number=1))
    return min(_MOST_REPEATS, max(1, round(seconds / once_s)))
