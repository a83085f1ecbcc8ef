"""What a training costs on machines that are paid by the hour and may be taken away.

T = M e^(R / M) (e^(t / M) - 1) W / t

for W seconds of work with a checkpoint after every t seconds, R seconds from an interruption to the
next step, and an average of M seconds between interruptions of any of the machines.
"""

import math
from dataclasses import dataclass

from allstep.errors import check_not_negative, check_positive
from allstep.plan.predict import Prediction
from allstep.plan.time_to_target import Target

_DAY_S = 86_400.0
_LARGEST_EXPONENT = 700.0  # e to a larger power may not fit into a float


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of machines, and how often they are interrupted, as spot instances are.

    Args:
        per_hour: price of one machine per hour, in any currency.
        interruptions_per_day: average interruptions of one machine per day, at random times.
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
        """Expected seconds until the work is done; infinite if it hardly ever would be.

        Args:
            work_s: seconds of the work without interruptions.
            num_machines: number of machines; the work needs all of them.
        """
        if not self.interruptions_per_day:
            return work_s
        between_s = _DAY_S / (self.interruptions_per_day * num_machines)
        part, restart = self.checkpoint_every_s / between_s, self.restart_s / between_s
        if part + restart > _LARGEST_EXPONENT:
            return math.inf
        return work_s * math.exp(restart) * math.expm1(part) / part

    def total(self, work_s: float, num_machines: int) -> float:
        """The cost of all machines until the work is done; arguments as in `seconds`."""
        return self.per_hour * num_machines * self.seconds(work_s, num_machines) / 3600


def work_s(prediction: Prediction, target: Target | None = None) -> float | None:
    """Seconds of a whole training without interruptions; None if its length is unknown.

    Args:
        prediction: the prediction of a step.
        target: how the number of samples grows with the batch; None if it doesn't.

    Returns:
        The seconds.
    """
    training_s = prediction.training_s
    if training_s is None or target is None:
        return training_s
    samples = target.samples(prediction.global_batch)
    return training_s * samples / target.samples(prediction.single_worker_batch)
