"""Learning-rate schedules: pure functions from the step to a multiplier of the learning rate."""

import itertools
import math
from collections.abc import Callable, Sequence

from allstep.errors import UsageError

__all__ = ["Schedule", "constant", "cosine", "poly", "step_decay"]

Schedule = Callable[[int], float]


def constant(*, warmup_steps: int = 0) -> Schedule:
    """1 at every step after a linear warm-up.

    multiplier(step) = min(1, (step + 1) / warmup_steps)

    Args:
        warmup_steps: steps of linear growth; the last of them runs at the full rate.

    Returns:
        A function of the step, which counts from 0.

    >>> [constant(warmup_steps=4)(step) for step in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]

    Source: the gradual warm-up of Goyal et al., 2017, arXiv:1706.02677.
    """
    _check_warmup(warmup_steps)

    def multiplier(step: int) -> float:
        return 1.0 if step >= warmup_steps else (step + 1) / warmup_steps

    return multiplier


def cosine(total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """Half a cosine wave from 1 down to `final`, after a linear warm-up.

    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    multiplier(step) = final + (1 - final) * (1 + cos(pi * progress)) / 2

    Args:
        total_steps: the step at which `final` is reached; it stays there afterwards.
        warmup_steps: steps of linear growth before, part of `total_steps`.
        final: the last multiplier, 0 to 1.

    Returns:
        A function of the step, which counts from 0.

    Raises:
        UsageError: if the warm-up is not shorter than the whole, or `final` is not in 0 to 1.

    >>> [round(cosine(4)(step), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]

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
        total_steps: the step at which `final` is reached; it stays there afterwards.
        warmup_steps: steps of linear growth before, part of `total_steps`.
        power: > 0; 1 is linear, 2 is the usual choice with LARS.
        final: the last multiplier, 0 to 1.

    Returns:
        A function of the step, which counts from 0.

    Raises:
        UsageError: if an argument is out of range.

    >>> [poly(4, power=1.0)(step) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if not power > 0:
        raise UsageError(f"`power` (={power}) must be positive; 2 is the usual choice.")
    return _decay(total_steps, warmup_steps, final, lambda progress: (1 - progress) ** power)


def step_decay(milestones: Sequence[int], factor: float = 0.1, warmup_steps: int = 0) -> Schedule:
    """Multiplied by `factor` at each of the milestones, after a linear warm-up.

    multiplier(step) = factor ** (number of milestones <= step)

    Args:
        milestones: increasing steps, counted from 0 with the warm-up included.
        factor: what each milestone multiplies by, above 0 and at most 1.
        warmup_steps: steps of linear growth before the first milestone.

    Returns:
        A function of the step, which counts from 0.

    Raises:
        UsageError: if the milestones don't increase or an argument is out of range.

    >>> [step_decay([2, 4], factor=0.5)(step) for step in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    steps = list(milestones)
    _check_warmup(warmup_steps)
    if not 0 < factor <= 1:
        raise UsageError(f"`factor` (={factor}) must be above 0 and at most 1; 0.1 is usual.")
    if any(late <= early for early, late in itertools.pairwise(steps)):
        raise UsageError(f"`milestones` (={steps}) must increase; sort them and drop repeats.")
    if steps and steps[0] < warmup_steps:
        raise UsageError(
            f"`milestones` (={steps}) must not begin before the warm-up ends;"
            f" `warmup_steps` is {warmup_steps}."
        )
    warmup = constant(warmup_steps=warmup_steps)

    def multiplier(step: int) -> float:
        passed = sum(milestone <= step for milestone in steps)
        return warmup(step) * factor**passed

    return multiplier


def _decay(
    total_steps: int, warmup_steps: int, final: float, shape: Callable[[float], float]
) -> Schedule:
    _check_warmup(warmup_steps)
    if total_steps <= warmup_steps:
        raise UsageError(
            f"`total_steps` (={total_steps}) must exceed `warmup_steps` (={warmup_steps});"
            " train longer or warm up less."
        )
    if not 0 <= final <= 1:
        raise UsageError(f"`final` (={final}) must be between 0 and 1, the share of the full rate.")
    warmup = constant(warmup_steps=warmup_steps)

    def multiplier(step: int) -> float:
        if step < warmup_steps:
            return warmup(step)
        progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return final + (1 - final) * shape(progress)

    return multiplier


def _check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise UsageError(f"`warmup_steps` (={warmup_steps}) must be 0 or more.")
