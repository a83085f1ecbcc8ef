"""Differences of two runs that are rounding, amplified by the training.

[Note: amplified rounding] Sums in another order differ in their last bits, and a training at a
high rate enlarges any difference, by about the same factor with each step:

    |x_k - y_k| / |x_k|  ~  c g^k        c: some rounding units,  g: the growth

so that two runs of one script look unrelated in the end, whatever its c. It can't be told from a
small mistake by its size; but it vanishes where sums are exact, or rounding is 1e-16 instead of
1e-7, and a mistake stays.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from allstep.doctor.verify.compare import Divergence, find_divergence, gradient_difference
from allstep.doctor.verify.record import RunRecord

RoundingFactor = Literal["order of sums", "float32"]

_SATURATED = 0.3  # relative difference from which growth slows down
_FEWEST_STEPS = 3  # that a growth can be had from
_LEAST_GROWTH = 1.02


@dataclass(frozen=True)
class Rounding:
    """A difference that vanishes with the rounding.

    Attributes:
        divergence: where it first is larger than rounding by itself.
        vanishes_without: "order of sums" (exact sums, the same bits) or "float32" (in float64).
        at_first: relative difference of the gradients of the first step in which there is one.
        growth: factor from one step to the next; None if it doesn't grow steadily.
        unrelated_at: the step at which the difference is as large as the gradients; None if
            that can't be told.
    """

    divergence: Divergence
    vanishes_without: RoundingFactor
    at_first: float
    growth: float | None
    unrelated_at: int | None


def measure_rounding(
    one: RunRecord, other: RunRecord, divergence: Divergence, vanishes_without: RoundingFactor
) -> Rounding:
    """How a difference of two runs grows that is known to be rounding."""
    num_steps = min(one.num_steps, other.num_steps)
    differences = [gradient_difference(one, other, step) for step in range(num_steps)]
    growth, unrelated_at = _growth(differences)
    at_first = next((d for d in differences if d), 0.0)
    return Rounding(divergence, vanishes_without, at_first, growth, unrelated_at)


def _growth(differences: list[float]) -> tuple[float | None, int | None]:
    """The factor a step and the step at which the difference is 1, of a line through logarithms.

    >>> _growth([1e-7, 1e-6, 1e-5, 1e-4])
    (10.0, 7)
    >>> _growth([1e-7, 1e-7, 1e-7])
    (None, None)
    """
    end = next((k for k, d in enumerate(differences) if d > _SATURATED), len(differences))
    steps = [k for k in range(end) if 0 < differences[k] < math.inf]
    if len(steps) < _FEWEST_STEPS:
        return None, None
    slope, start = np.polyfit(steps, np.log([differences[k] for k in steps]), 1)
    growth = round(math.exp(slope), 3)
    if growth < _LEAST_GROWTH:
        return None, None
    return growth, max(math.ceil(round(-start / slope, 6)), end)


def is_gone(one: RunRecord, other: RunRecord, step: int, without: RoundingFactor) -> bool:
    """Whether two runs that were made without rounding agree, up to a step and with it.

    Exact sums leave the same bits; in float64 there is a limit of its own.
    """
    if min(one.num_steps, other.num_steps) <= step:
        return False
    one, other = one.before(step + 1), other.before(step + 1)
    if find_divergence(one, other) is not None:
        return False
    both = zip(one.first.steps, other.first.steps, strict=True)
    return without == "float32" or all(x.checksum == y.checksum for x, y in both)
