"""Learning-rate schedules: pure functions from the step to a multiplier of the learning rate.

Steps count from 0. Counted in optimizer steps or, by `in_samples`, in samples, a schedule never
depends on the number of workers. One that has an end refuses to be asked beyond it: a rate that
stays at its last value, often 0, would train nothing in silence. `hold` allows it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from allstep.errors import UsageError, check_not_negative, check_positive, check_share

Schedule = Callable[[int], float]


def constant() -> Schedule:
    """1 at every step.

    Returns:
        A function of the step, which counts from 0.

    >>> constant()(7)
    1.0
    """

    def multiplier(step: int) -> float:
        check_step(step)
        return 1.0

    return multiplier


def cosine(total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """Half a cosine wave from 1 down to `final`, after a linear warm-up.

    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    multiplier(step) = final + (1 - final) * (1 + cos(pi * progress)) / 2

    Args:
        total_steps: the step at which `final` is reached, and the last that may be asked for.
        warmup_steps: steps of linear growth before, part of `total_steps`.
        final: the last multiplier, 0 to 1.

    Returns:
        A function of the step, which counts from 0.

    Raises:
        UsageError: if the warm-up is not shorter than the whole, or `final` is not in 0 to 1;
            from the schedule, if asked beyond its end.

    >>> [round(cosine(4)(step), 3) for step in range(5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]

    Source: Loshchilov and Hutter, 2017, arXiv:1608.03983 (without restarts).
    """
    return _decay(
        total_steps, warmup_steps, final, lambda progress: (1 + math.cos(math.pi * progress)) / 2
    )


def poly(
    total_steps: int, warmup_steps: int = 0, power: float = 2.0, final: float = 0.0
) -> Schedule:
    """A power of the share of steps that is left, from 1 down to `final`, after a warm-up.

    multiplier(step) = final + (1 - final) * (1 - progress) ** power, with `cosine`'s progress

    Args:
        total_steps: the step at which `final` is reached, and the last that may be asked for.
        warmup_steps: steps of linear growth before, part of `total_steps`.
        power: a positive number; 1 is linear, 2 is the usual choice with LARS.
        final: the last multiplier, 0 to 1.

    Returns:
        A function of the step, which counts from 0.

    Raises:
        UsageError: if an argument is out of range; from the schedule, if asked beyond its end.

    >>> [poly(4, power=1.0)(step) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    check_positive("power", power, "2 is the usual choice")
    return _decay(total_steps, warmup_steps, final, lambda progress: (1 - progress) ** power)


def step_decay(milestones: Sequence[int], factor: float = 0.1) -> Schedule:
    """A constant that is multiplied by `factor` at each milestone.

    multiplier(step) = factor ** (number of milestones <= step)

    Args:
        milestones: increasing steps, counted from 0; a `gradual_warmup` leaves them in place.
        factor: what each milestone multiplies by, above 0 and at most 1.

    Returns:
        A function of the step, which counts from 0.

    Raises:
        UsageError: if the milestones don't increase or `factor` is out of range.

    >>> [step_decay([2, 4], factor=0.5)(step) for step in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    if not isinstance(milestones, Iterable):
        raise UsageError(f"`milestones` (={milestones!r}) must be steps, such as [30, 60, 80].")
    steps = list(milestones)
    for step in steps:
        check_not_negative("milestones", step, "each is a step")
    check_share("factor", factor, "(0, 1]", "0.1 is usual")
    if any(late <= early for early, late in itertools.pairwise(steps)):
        raise UsageError(f"`milestones` (={steps}) must increase; sort them and drop repeats.")

    def multiplier(step: int) -> float:
        check_step(step)
        return factor ** sum(milestone <= step for milestone in steps)

    return multiplier


def slow_start(total_steps: int) -> Schedule:
    """Half the rate for 40 of 90 epochs, then 0.075, 0.01 and 0.001 of it; fractions stay so.

    The multipliers of 0.1 * batch / 256 in the 15-minute training; it goes with `RMSpropWarmup`
    and has no other warm-up.

    Args:
        total_steps: of the whole run; the parts end after 40, 70, 85 and 90 ninetieths of it.

    Returns:
        A function of the step, which counts from 0.

    Raises:
        UsageError: if `total_steps` is not positive; from the schedule, if asked beyond its end.

    >>> [slow_start(90)(step) for step in (0, 39, 40, 69, 70, 84, 85, 90)]
    [0.5, 0.5, 0.075, 0.075, 0.01, 0.01, 0.001, 0.001]

    Source: Akiba et al., 2017, arXiv:1711.04325, section 2.
    """
    check_positive("total_steps", total_steps, "it is of the whole run")
    parts = ((40, 0.5), (70, 0.075), (85, 0.01), (90, 0.001))

    def multiplier(step: int) -> float:
        check_step(step, total_steps)
        return next((value for end, value in parts if 90 * step < end * total_steps), 0.001)

    return multiplier


def sgd_share(step: float, center_steps: float, period_steps: float) -> float:
    """The weight of SGD in `RMSpropWarmup`: an exponential, a line, then 1.

    share = exp(2 * (step - center_steps) / period_steps) / 2 before `center_steps`;
    1 / 2 + (step - center_steps) / period_steps for half a period from there; 1 afterwards

    The printed line is twice as steep. It would exceed 1, make RMSprop's weight negative and jump
    back; the text says that it ends at 1, and the slope here is that of the exponential where
    they meet.

    Args:
        step: counts from 0; any unit of time will do if all three share it.
        center_steps: where the share is a half.
        period_steps: the length of the transition, which ends half of it after the center.

    Returns:
        The share, above 0 and at most 1.

    Raises:
        UsageError: if `period_steps` is not positive or `center_steps` is negative.

    >>> [round(sgd_share(epoch, 10, 5), 4) for epoch in (0, 5, 9, 10, 11, 12, 12.5, 90)]
    [0.0092, 0.0677, 0.3352, 0.5, 0.7, 0.9, 1.0, 1.0]

    Source: Akiba et al., 2017, arXiv:1711.04325, section 2, corrected.
    """
    if not period_steps > 0:
        raise UsageError(f"`period_steps` (={period_steps}) must be positive; 5 epochs are usual.")
    if not center_steps >= 0:
        raise UsageError(
            f"`center_steps` (={center_steps}) must be 0 or more; 10 epochs are usual."
        )
    periods = (step - center_steps) / period_steps
    if periods < 0:
        return math.exp(2 * periods) / 2
    return min(0.5 + periods, 1.0)


def _decay(
    total_steps: int, warmup_steps: int, final: float, shape: Callable[[float], float]
) -> Schedule:
    check_warmup(warmup_steps)
    check_positive("total_steps", total_steps, "it is of the whole run")
    if total_steps <= warmup_steps:
        raise UsageError(
            f"`total_steps` (={total_steps}) must exceed `warmup_steps` (={warmup_steps});"
            " train longer or warm up less."
        )
    check_share("final", final, cure="it is a share of the full rate")

    def multiplier(step: int) -> float:
        check_step(step, total_steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / (total_steps - warmup_steps)
        return final + (1 - final) * shape(progress)

    return multiplier


def check_warmup(warmup_steps: int) -> None:
    """Raises UsageError for a warm-up of negative length."""
    check_not_negative("warmup_steps", warmup_steps, "0 leaves it out")


def check_schedule(schedule: object) -> None:
    """Raises UsageError if a schedule can't be called with a step."""
    if not callable(schedule):
        raise UsageError(
            f"`schedule` (={schedule!r}) must be a function of the step, such as"
            " `allstep.optim.constant()`."
        )


def check_step(step: int, total_steps: int | None = None) -> None:
    """Raises UsageError for a step before the beginning or beyond the end of a schedule."""
    if not step >= 0:
        raise UsageError(f"`step` (={step}) must be 0 or more; steps count from 0.")
    if total_steps is not None and step > total_steps:
        raise UsageError(
            f"`step` (={step}) is beyond the schedule's end (`total_steps` is {total_steps}); make"
            " the schedule longer, or keep its last value with"
            " `allstep.optim.hold(schedule, total_steps)`."
        )
