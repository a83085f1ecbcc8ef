"""Random variation of the workers' compute time from step to step."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allstep.errors import UsageError, check_not_negative, check_share


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """A distribution of the factor on the time of a worker's compute in a step.

    factor = exp(spread * z - spread^2 / 2), z normal: its mean is 1
    factor *= slow_factor, with `slow_probability`

    Args:
        spread: standard deviation of the factor's logarithm; 0.03 is about 3 %.
        slow_probability: probability that a worker's step is slow.
        slow_factor: additional factor of a slow step.
        seed: seed of the random numbers.

    Raises:
        UsageError: for numbers out of range.

    >>> Stragglers(spread=0.03).draw(0, 100_000).mean().round(3)
    np.float64(1.0)
    """

    spread: float = 0.0
    slow_probability: float = 0.0
    slow_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_not_negative("spread", self.spread, "0.03 is about 3 %")
        check_share("slow_probability", self.slow_probability)
        if not 1 <= self.slow_factor < math.inf:
            raise UsageError(f"`slow_factor` (={self.slow_factor}) must be at least 1.")

    @property
    def is_active(self) -> bool:
        """Whether workers differ at all."""
        return self.spread > 0 or (self.slow_probability > 0 and self.slow_factor > 1)

    @property
    def mean_factor(self) -> float:
        """The mean of the factors in the long run.

        >>> Stragglers(spread=0.5, slow_probability=0.1, slow_factor=3).mean_factor
        1.2
        """
        return 1 + self.slow_probability * (self.slow_factor - 1)

    def draw(self, step: int, num_workers: int) -> NDArray[np.float64]:
        """The factors of one step, [num_workers]; for the same step they are always the same."""
        if not self.is_active:
            return np.ones(num_workers)
        rng = np.random.default_rng([self.seed, step])
        factor = np.exp(self.spread * rng.standard_normal(num_workers) - self.spread**2 / 2)
        slow = rng.random(num_workers) < self.slow_probability
        return np.where(slow, self.slow_factor * factor, factor)


NO_STRAGGLERS = Stragglers()
