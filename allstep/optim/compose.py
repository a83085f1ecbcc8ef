"""Schedules that are composed of other schedules."""

from collections.abc import Sequence

from allstep.errors import UsageError, check_integer, check_share
from allstep.optim.schedules import Schedule, check_schedule, check_step, check_warmup


def gradual_warmup(schedule: Schedule, warmup_steps: int, start: float = 0.0) -> Schedule:
    """A schedule multiplied by a line from `start` to 1.

    multiplier(step) = schedule(step) * (start + (1 - start) * (step + 1) / warmup_steps), and
    schedule(step) from `warmup_steps` on

    Args:
        schedule: counted from the same step 0, so its milestones stay where they are.
        warmup_steps: the last of them runs at the full rate.
        start: where the line begins; base batch / batch begins at the small batch's rate, when
            the rate was scaled linearly.

    Returns:
        The schedule with the warm-up.

    Raises:
        UsageError: if `schedule` is no function, `warmup_steps` negative or `start` not in 0 to 1.

    >>> from allstep.optim import constant
    >>> [gradual_warmup(constant(), 4, start=0.5)(step) for step in range(5)]
    [0.625, 0.75, 0.875, 1.0, 1.0]

    Source: Goyal et al., 2017, arXiv:1706.02677, section 2.2.
    """
    check_schedule(schedule)
    check_warmup(warmup_steps)
    check_share("start", start, cure="it is a share of the full rate")

    def multiplier(step: int) -> float:
        if step >= warmup_steps:
            return schedule(step)
        return schedule(step) * (start + (1 - start) * (step + 1) / warmup_steps)

    return multiplier


def hold(schedule: Schedule, total_steps: int) -> Schedule:
    """A schedule that keeps its value of step `total_steps` afterwards.

    Args:
        schedule: step -> multiplier, for steps up to `total_steps`.
        total_steps: the last step at which it is asked.

    Returns:
        The schedule for all steps.

    Raises:
        UsageError: if `schedule` is no function.

    >>> from allstep.optim import poly
    >>> [hold(poly(2, power=1.0, final=0.5), 2)(step) for step in range(5)]
    [1.0, 0.75, 0.5, 0.5, 0.5]
    """
    check_schedule(schedule)
    return lambda step: schedule(min(step, total_steps))


def in_samples(
    schedule: Schedule, global_batch: int, samples_per_epoch: int | None = None
) -> Schedule:
    """A schedule over samples as one over steps, each of a given number of samples.

    multiplier(step) = schedule(samples seen before the step)

    Args:
        schedule: a function of the number of samples seen, whatever their batch.
        global_batch: samples of one optimizer step, over all workers.
        samples_per_epoch: if the last batch of an epoch may be smaller; None if all are whole.

    Returns:
        The schedule as a function of the optimizer's step.

    Raises:
        UsageError: if `schedule` is no function, or a number below 1 or not whole.

    >>> from allstep.optim import poly
    >>> [in_samples(poly(128, power=1.0), 32)(step) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    >>> short = in_samples(poly(80, power=1.0), 32, samples_per_epoch=40)
    >>> [round(short(step), 3) for step in range(5)]
    [1.0, 0.6, 0.5, 0.1, 0.0]
    """
    check_schedule(schedule)
    check_integer("global_batch", global_batch)
    if samples_per_epoch is not None:
        check_integer("samples_per_epoch", samples_per_epoch)

    def multiplier(step: int) -> float:
        check_step(step)
        if samples_per_epoch is None:
            return schedule(step * global_batch)
        num_epochs, rest = divmod(step, -(-samples_per_epoch // global_batch))
        return schedule(num_epochs * samples_per_epoch + rest * global_batch)

    return multiplier


def chain(stages: Sequence[tuple[int, Schedule]]) -> Schedule:
    """Several schedules in sequence, each counted from its own step 0.

    Two warm-ups with a decay each are LAMB's mixed batch: when the batch and the length of the
    sequences change, the rate begins again from 0, so that new statistics meet no large rate.

    Args:
        stages: (number of steps, schedule) of each stage; the last may be asked at its end, too.

    Returns:
        The schedule of the whole run.

    Raises:
        UsageError: if there is no stage, or one has no step or no function; from the schedule,
            if asked beyond the last stage.

    >>> from allstep.optim import poly
    >>> chained = chain([(2, poly(2, power=1.0)), (4, poly(4, power=1.0))])
    >>> [chained(step) for step in range(7)]
    [1.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]

    Source: You et al., 2020, arXiv:1904.00962, section 4.1 (re-warm-up).
    """
    lengths = [num_steps for num_steps, _ in stages]
    if not lengths or min(lengths) < 1:
        raise UsageError(f"`stages` (of {lengths} steps) must be one or more, of 1 step or more.")
    for _, schedule in stages:
        check_schedule(schedule)
    total_steps = sum(lengths)

    def multiplier(step: int) -> float:
        check_step(step, total_steps)
        begin = 0
        for num_steps, schedule in stages[:-1]:
            if step < begin + num_steps:
                return schedule(step - begin)
            begin += num_steps
        return stages[-1][1](step - begin)

    return multiplier
