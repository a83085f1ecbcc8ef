"""Whether more data or a larger model would lower the error, or more workers only save time."""

from dataclasses import dataclass

from allstep.plan.learning_curve import Interval

WORTH_DOUBLING = 0.1  # share of the error that twice as many samples have to remove
LARGE_FLOOR = 0.5  # share of the error that stays with any amount of data


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What a learning curve predicts for more samples than there are.

    Args:
        num_samples: number of samples of the training set.
        error: held-out error with all of them, by the curve.
        twice: held-out error with twice as many samples, by the curve.
        twice_interval: confidence interval of `twice`.
        floor: the error that stays with any amount of data; None if it is unknown.
        floor_interval: confidence interval of the floor.

    >>> growth = Growth(num_samples=60_000, error=0.1, twice=0.08, floor=None,
    ...     twice_interval=Interval(0.07, 0.09), floor_interval=Interval(0.0, 0.04))
    >>> growth.what
    'more data'
    """

    num_samples: int
    error: float
    twice: float
    twice_interval: Interval
    floor: float | None
    floor_interval: Interval

    @property
    def what(self) -> str:
        """What would help most: `a larger model`, `more data` or `more workers`."""
        if self.floor is not None and self.floor >= LARGE_FLOOR * self.error:
            return "a larger model"
        is_worth = self.error - self.twice >= WORTH_DOUBLING * self.error
        return "more data" if is_worth else "more workers"

    @property
    def sentence(self) -> str:
        """The advice, with its figures."""
        low, high = self.twice_interval.low, self.twice_interval.high
        twice = (
            f"twice the {self.num_samples:,} samples would take the held-out error from"
            f" {self.error:.2%} to {self.twice:.2%} ({low:.2%} to {high:.2%})"
        )
        if self.what == "a larger model":
            low, high = self.floor_interval.low, self.floor_interval.high
            return (
                f"a larger model: {self.floor:.2%} ({low:.2%} to {high:.2%}) of the error of"
                f" {self.error:.2%} stays with any amount of data, in as many steps (a longer"
                f" training may take a part of it, too); {twice}."
            )
        if self.what == "more data":
            return f"more data: {twice}. More workers train on them in less time, not better."
        return (
            f"more workers: {twice}, and the curve knows no large part that a larger model would"
            " have to take; workers save time, and leave the error as it is."
        )
