"""Measured times of a bucket's exchange, which replace the formulas."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from allstep.errors import UsageError, check_choice, check_not_negative
from allstep.plan.algorithms import ALGORITHMS
from allstep.plan.compression import COMPRESSIONS


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """Seconds of encoding, summing and decoding buckets, timed on all workers together.

    Between two measured sizes the time is interpolated. Beyond the largest size the line through
    the last two goes on, but its seconds per element are at most those of the largest bucket: a
    steeper line means that one of the two measurements was disturbed.

    Args:
        compression: format in which gradients are sent.
        algorithm: the all-reduce algorithm.
        num_elements: numbers of elements of the timed buckets, increasing.
        seconds: seconds of a bucket of each size, in a series without pauses.
        compute_slowdown: how much longer compute takes during an exchange; 0.1 is 10 %.
        communication_slowdown: how much longer an exchange takes during compute; 0.1 is 10 %.

    Raises:
        UsageError: for unknown names, fewer than two sizes, or numbers out of range.

    >>> timed = MeasuredCollective(
    ...     compression="fp32", algorithm="ring", num_elements=(1000, 2000), seconds=(0.2, 0.3))
    >>> round(timed.seconds_of(500), 3), round(timed.seconds_of(4000), 3)
    (0.15, 0.5)
    """

    compression: str
    algorithm: str
    num_elements: tuple[int, ...]
    seconds: tuple[float, ...]
    compute_slowdown: float = 0.0
    communication_slowdown: float = 0.0

    def __post_init__(self) -> None:
        for name, known in (("compression", COMPRESSIONS), ("algorithm", ALGORITHMS)):
            check_choice(name, getattr(self, name), known)
        sizes, seconds = self.num_elements, self.seconds
        grows = all(0 < low < high for low, high in pairwise(sizes))
        if len(sizes) < 2 or not grows:
            raise UsageError(f"`num_elements` (={sizes}) must be two or more that increase.")
        if len(seconds) != len(sizes) or not all(0 < s < math.inf for s in seconds):
            raise UsageError(f"`seconds` (={seconds}) must be above 0, one for each size.")
        for name in ("compute_slowdown", "communication_slowdown"):
            check_not_negative(name, getattr(self, name), "0.1 means 10 % slower")

    @property
    def latency_s(self) -> float:
        """Seconds of an empty bucket."""
        return self._extended[1][0]

    def seconds_of(self, num_elements: int) -> float:
        """Seconds of a bucket of any size."""
        sizes, seconds = self._extended
        if num_elements > sizes[-1]:
            (n0, n1), (s0, s1) = sizes[-2:], seconds[-2:]
            each_s = min((s1 - s0) / (n1 - n0), s1 / n1)
            return s1 + each_s * (num_elements - n1)
        return float(np.interp(num_elements, sizes, seconds))

    @property
    def _extended(self) -> tuple[Sequence[int], Sequence[float]]:
        """The measured sizes and seconds, extrapolated from the first two sizes to no elements.

        Seconds never fall with the size: a time that is above a larger bucket's was disturbed, and
        is replaced by that one.
        """
        rising = [min(self.seconds[i:]) for i in range(len(self.seconds))]
        (n0, n1), (s0, s1) = self.num_elements[:2], rising[:2]
        empty_s = min(s0, max(0.5 * s0, s0 - (s1 - s0) * n0 / (n1 - n0)))
        return (0, *self.num_elements), (empty_s, *rising)
