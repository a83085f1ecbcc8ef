"""What a training costs on machines that are paid by the hour and may be taken away.

T = M e^(R / M) (e^(t / M) - 1) W / t

for W seconds of work with a checkpoint after every t of them, R seconds from an interruption to the
next step, and M seconds from one interruption to the next on average, of all machines together.
"""

import math
from dataclasses import dataclass

from allstep.errors import check_not_negative, check_positive
from allstep.plan.predict import Prediction
from allstep.plan.time_to_target import Target

_DAY_S = 86_400.0
_LARGEST_EXPONENT = 700.0  # of e, in a float


@dataclass(frozen=True, kw_only=True)
class Price:
    """Of machines, and how often they are taken away, such as spot instances.

    Args:
        per_hour: of one machine, in any currency.
        interruptions_per_day: of one machine, on average, whenever.
        restart_s: seconds from an interruption to the next step; all machines wait, and are paid.
        checkpoint_every_s: seconds of training after which a checkpoint is written. What was
            computed since the last one is computed again.

    Raises:
        UsageError: for numbers out of range.

    >>> price = Price(per_hour=2.0, interruptions_per_day=1.0)
    >>> round(price.seconds(36_000, num_machines=8)), round(price.total(36_000, num_machines=8), 2)
    (37432, 166.37)

    Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
    Future Generation Computer Systems 22 (2006), equation 13, without the time of a checkpoint.
    """

    per_hour: float
    interruptions_per_day: float = 0.0
    restart_s: float = 120.0
    checkpoint_every_s: float = 600.0

    def __post_init__(self) -> None:
        check_not_negative("per_hour", self.per_hour, "2.5 is 2.5 for a machine and an hour")
        check_not_negative("interruptions_per_day", self.interruptions_per_day, "0.5: in two days")
        check_not_negative("restart_s", self.restart_s, "120 is usual for a new machine")
        check_positive("checkpoint_every_s", self.checkpoint_every_s, "600 is ten minutes")

    def seconds(self, work_s: float, num_machines: int) -> float:
        """Expected seconds until so much work is done; infinite if it hardly ever would be.

        Args:
            work_s: seconds that it takes undisturbed.
            num_machines: that must all be there.
        """
        if not self.interruptions_per_day:
            return work_s
        between_s = _DAY_S / (self.interruptions_per_day * num_machines)
        part, restart = self.checkpoint_every_s / between_s, self.restart_s / between_s
        if part + restart > _LARGEST_EXPONENT:
            return math.inf
        return work_s * math.exp(restart) * math.expm1(part) / part

    def total(self, work_s: float, num_machines: int) -> float:
        """What all machines cost until so much work is done; see `seconds`."""
        return self.per_hour * num_machines * self.seconds(work_s, num_machines) / 3600


def work_s(prediction: Prediction, target: Target | None = None) -> float | None:
    """Undisturbed seconds of a whole training; None if its length isn't known.

    Args:
        prediction: of a step.
        target: what a larger batch costs in samples; None for as many samples with any batch.

    Returns:
        Seconds.
    """
    training_s = prediction.training_s
    if training_s is None or target is None:
        return training_s
    samples = target.samples(prediction.global_batch)
    return training_s * samples / target.samples(prediction.single_worker_batch)
