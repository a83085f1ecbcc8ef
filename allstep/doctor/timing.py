"""Clocks of several workers made one."""

from collections.abc import Callable
from time import perf_counter

import torch

from allstep.comm import Communicator

__all__ = ["agreed_repeats", "mean_s", "slowest_s", "synchronize"]

_MOST_REPEATS = 256


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done what it was told on the present stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def slowest_s(comm: Communicator, seconds: float) -> float:
    """The slowest worker's seconds, on all of them. Collective."""
    own = torch.tensor(seconds, dtype=torch.float64)
    return float(comm.all_reduce(own, "max").item())


def mean_s(comm: Communicator, seconds: float) -> float:
    """The workers' mean, on all of them. Collective."""
    own = torch.tensor(seconds, dtype=torch.float64)
    return float(comm.all_reduce(own, "mean"))


def agreed_repeats(comm: Communicator, work: Callable[[], object], seconds: float) -> int:
    """How often all workers should do something for it to take about so long. Collective."""
    start_s = perf_counter()
    work()
    once_s = slowest_s(comm, perf_counter() - start_s)
    return min(_MOST_REPEATS, max(1, round(seconds / once_s)))
