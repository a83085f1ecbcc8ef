"""Estimates the latency and bandwidth of a link from timed collectives."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allstep.errors import UsageError, check_choice
from allstep.plan.algorithms import ALGORITHMS, path_of
from allstep.plan.nodes import Link, Nodes


@dataclass(frozen=True)
class Timing:
    """An all-reduce of `num_bytes` on `num_workers` workers that took `seconds`."""

    num_workers: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A link, and how well it explains the timings.

    Attributes:
        link: latency and bandwidth as achieved, the time of the additions included.
        errors: predicted / timed - 1 for each timing.
    """

    link: Link
    errors: tuple[float, ...]


def fit_link(timings: Sequence[Timing], algorithm: str = "ring") -> Fit:
    """Fits the latency and bandwidth that explain timed all-reduces best.

    seconds = latency_s * messages + bytes * 8 / bandwidth_bps

    The fit takes least squares of the *relative* errors, so that short collectives count as much as
    long ones.

    Args:
        timings: timings of at least two sizes; all workers are joined by the same kind of link.
        algorithm: the algorithm that was timed.

    Returns:
        The link, and its error for each timing.

    Raises:
        UsageError: for an unknown algorithm, too few sizes, or times that don't grow with size.

    >>> link = Link(bandwidth_bps=1e9, latency_s=1e-4)
    >>> timed = [Timing(2, n, link.seconds(n, 2)) for n in (1000, 1_000_000)]
    >>> round(fit_link(timed).link.latency_s, 9)
    0.0001
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    rows = np.array([_messages_and_bytes(timing, algorithm) for timing in timings])
    seconds = np.array([timing.seconds for timing in timings])
    if len({timing.num_bytes for timing in timings}) < 2 or not (seconds > 0).all():
        raise UsageError(
            f"`timings` (={list(timings)}) must hold at least two sizes, each with a time above 0."
        )
    latency_s, s_per_byte = _solve(rows / seconds[:, None])
    if s_per_byte <= 0:
        raise UsageError(
            "`timings` don't grow with size, so that no bandwidth follows; time larger ones, too."
        )
    link = Link(bandwidth_bps=8 / s_per_byte, latency_s=latency_s)
    predicted = rows @ np.array([latency_s, s_per_byte])
    return Fit(link, tuple(float(error) for error in predicted / seconds - 1))


def _messages_and_bytes(timing: Timing, algorithm: str) -> tuple[float, float]:
    unit = Link(bandwidth_bps=8.0)
    hosts = Nodes(num_nodes=timing.num_workers, workers_per_node=1, intra=unit, inter=unit)
    path = path_of(ALGORITHMS[algorithm], hosts, timing.num_bytes)
    return (
        sum(transfer.num_messages for transfer in path),
        sum(transfer.sharing * transfer.num_bytes for transfer in path),
    )


def _solve(rows: np.ndarray) -> tuple[float, float]:
    """The least-squares solution of rows @ (latency, s per byte) = 1 with a latency >= 0."""
    ones = np.ones(len(rows))
    latency_s, s_per_byte = np.linalg.lstsq(rows, ones, rcond=None)[0]
    if latency_s < 0:
        column = rows[:, 1]
        return 0.0, float(column.sum() / (column @ column))
    return float(latency_s), float(s_per_byte)
