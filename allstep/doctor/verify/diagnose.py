"""Compares two runs of a script, and finds the cause of a difference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from allstep.doctor.verify.ablation import Factor
from allstep.doctor.verify.axis_causes import axis_causes, output_apart, sharers_apart
from allstep.doctor.verify.causes import (
    Cause,
    format_causes,
    option_causes,
    peer_causes,
    seed_words,
)
from allstep.doctor.verify.compare import Divergence, find_divergence, nonfinite_step
from allstep.doctor.verify.gradients import (
    batch_causes,
    data_causes,
    gradient_causes,
    stream_causes,
)
from allstep.doctor.verify.record import RunRecord
from allstep.doctor.verify.rounding import (
    Rounding,
    RoundingFactor,
    is_gone,
    measure_rounding,
)
from allstep.errors import UsageError

_CAUSES_OF_GRADIENTS = (
    "data not sharded",
    "workers apart",
    "number format",
    "seed depends on rank",
)
_CAUSES_OF_OPTIONS = ("learning rate scaled", "scheduler", "optimizer options")
_LARGE = 0.01  # relative difference of the first step that is no rounding of one unit
_RANDOM_DATA: tuple[Factor, ...] = ("random data", "random loader")

# Runs both again for some steps, without the factors.
Rerun = Callable[[Sequence[Factor], int], tuple[RunRecord, RunRecord]]


@dataclass(frozen=True)
class Diagnosis:
    """The result of comparing a run with the first one.

    Attributes:
        divergence: where they first differ, or None.
        causes: the likely ones; none of a model that is the same, or if no cause fits.
        is_explained: whether the causes account for the divergence.
        nonfinite_at: the step from which neither run is finite, and nothing was compared; or None.
        rounding: what was larger than the limit and is gone without rounding; then all else is
            of the runs without.
    """

    divergence: Divergence | None
    causes: list[Cause]
    is_explained: bool
    nonfinite_at: int | None = None
    rounding: Rounding | None = None

    @property
    def is_same(self) -> bool:
        """Whether the model is the same, and no worker repeated another's work."""
        return self.divergence is None and not self.causes


def diagnose(one: RunRecord, other: RunRecord, rerun: Rerun) -> Diagnosis:
    """Compares a script's first steps on two numbers of workers.

    Signatures in the numbers come first. Where they say nothing about a difference, both runs are
    made again without rounding: in exact sums if all is in loops of `steps`, else in float64. If
    it is gone there it was rounding, and what is left to compare are the runs without. If not,
    these may have a signature that rounding hid. Else both are made again without batch norm,
    without random numbers or without the exchange's policy: a factor without which they agree is
    the cause.

    Args:
        one: the first run, such as the one on the fewest workers.
        other: another; one of them is finite after the first step.
        rerun: makes both again; raises UsageError if the script fails so.
    """
    nonfinite_at = nonfinite_step(one, other)
    one, other = one.before(nonfinite_at), other.before(nonfinite_at)
    divergence = find_divergence(one, other)
    causes = _signatures(one, other, divergence)
    base: list[Factor] = []
    # Rounding is small in the first step, and no signature of a mistake.
    is_small = divergence is not None and (divergence.step > 0 or divergence.difference < _LARGE)
    if divergence is not None and is_small and not _explains(divergence, causes):
        num_steps = min(one.num_steps, other.num_steps)
        is_exact = one.first.is_in_steps and other.first.is_in_steps and not other.first.policies
        surest_first: list[RoundingFactor] = ["order of sums", "float32"]
        for factor in surest_first[not is_exact :]:
            again = _made_again(rerun, [factor], num_steps)
            if again is None:
                continue
            if is_gone(*again, divergence.step, factor):
                rounding = measure_rounding(one, other, divergence, factor)
                rest = _diagnose(*again, rerun, [factor])
                return replace(rest, rounding=rounding, nonfinite_at=nonfinite_at)
            base = [factor]
            causes = _signatures(*again, find_divergence(*again))
            if _explains(divergence, causes):
                return Diagnosis(divergence, causes, True, nonfinite_at)
    return replace(_diagnose(one, other, rerun, base), nonfinite_at=nonfinite_at)


def _signatures(one: RunRecord, other: RunRecord, divergence: Divergence | None) -> list[Cause]:
    """Causes that need no further run: of the whole, and of the first difference."""
    causes = option_causes(one, other) + format_causes(one, other)
    along_axes = axis_causes(one, other, divergence)
    if along_axes:
        return causes + along_axes
    if not other.first.policies:
        causes += peer_causes(other)
    is_of_gradient = divergence is not None and divergence.quantity == "gradient"
    streams = stream_causes(one, other, divergence.step) if divergence and is_of_gradient else []
    causes += streams or data_causes(one, other)
    if divergence is None:
        causes += _sharer_causes(other)
    if divergence is not None and divergence.quantity == "initial parameters":
        evidence = f"`{divergence.name}` is another one before the first step"
        causes.append(Cause("initial parameters", evidence))
    is_open = not any(cause.name in _CAUSES_OF_GRADIENTS for cause in causes)
    if divergence is not None and is_of_gradient and is_open:
        causes += gradient_causes(one, other, divergence.step)
    return causes


def _sharer_causes(run: RunRecord) -> list[Cause]:
    """The cause, if whole tensors differ between workers that share a copy."""
    if (apart := sharers_apart(run)) is None:
        return []
    step, name = apart
    where = f"on the workers along {run.shared_axes()}, which each have all of it"
    return [Cause("workers apart", f"`{name}` is not the same {where}, after step {step}")]


def _explains(divergence: Divergence | None, causes: Sequence[Cause]) -> bool:
    """Whether the causes account for the first difference."""
    if divergence is None:
        return True
    if divergence.quantity == "gradient":
        return any(cause.name not in _CAUSES_OF_OPTIONS for cause in causes)
    return bool(causes)


def _made_again(
    rerun: Rerun, factors: Sequence[Factor], num_steps: int
) -> tuple[RunRecord, RunRecord] | None:
    """Both runs without some factors; None if the script fails without them."""
    try:
        one, other = rerun(factors, num_steps)
    except UsageError:
        return None
    nonfinite_at = nonfinite_step(one, other)
    return one.before(nonfinite_at), other.before(nonfinite_at)


def _diagnose(one: RunRecord, other: RunRecord, rerun: Rerun, base: Sequence[Factor]) -> Diagnosis:
    """The causes of a difference that is not rounding.

    Args:
        base: what further runs are to be without, too.
    """
    divergence = find_divergence(one, other)
    causes = _signatures(one, other, divergence)
    is_explained = _explains(divergence, causes)
    if divergence is not None and divergence.quantity == "gradient" and not is_explained:
        found = _causes_of_gradient(one, other, divergence.step, rerun, base)
        is_explained = bool(found)
        causes += found
    return Diagnosis(divergence, causes, is_explained)


def _causes_of_gradient(
    one: RunRecord, other: RunRecord, step: int, rerun: Rerun, base: Sequence[Factor]
) -> list[Cause]:
    for attempt in _attempts(_factors(one, other, step)):
        last = max(step, 1) if "random data" in attempt else step  # which empties the first
        again = _made_again(rerun, [*attempt, *base], last + 1)
        others = None if again is None else _causes_without(one, *again, last)
        if others is not None:
            return [_as_cause(factor, one, other, step) for factor in attempt] + others
    return _sharer_causes(other.before(step + 1)) or batch_causes(one, other, step)


def _factors(one: RunRecord, other: RunRecord, step: int) -> list[Factor]:
    factors: list[Factor] = []
    if other.first.policies:
        factors.append("exchange policy")
    if other.first.num_batch_norms:
        factors.append("batch norm")
    has_same_samples = one.all_samples(step) == other.all_samples(step)
    return [*factors, "random state"] if has_same_samples else [*factors, *_RANDOM_DATA]


def _attempts(factors: Sequence[Factor]) -> list[list[Factor]]:
    """Each factor by itself, and then with all the others; of random data one kind at a time."""
    singly = [[factor] for factor in factors]
    others = [factor for factor in factors if factor not in _RANDOM_DATA]
    random = [factor for factor in factors if factor in _RANDOM_DATA]
    together = [[*others, factor] for factor in random] or [others]
    return singly + [attempt for attempt in together if len(attempt) > 1]


def _causes_without(
    before: RunRecord, one: RunRecord, other: RunRecord, step: int
) -> list[Cause] | None:
    """The remaining causes without the factors; None if the factors are not the cause."""
    if step >= min(one.num_steps, other.num_steps):
        return None
    if len(before.all_samples(step)) > 1 and len(one.all_samples(step)) < 2:
        return None  # the data were made of random numbers: nothing is left of them
    divergence = find_divergence(one, other, quantities=("gradient",))
    if divergence is None:
        return []
    return gradient_causes(one, other, divergence.step) or None


def _as_cause(factor: Factor, one: RunRecord, run: RunRecord, step: int) -> Cause:
    if factor == "batch norm":
        return Cause(
            "batch norm",
            "each worker's batch norm sees only its own samples: with running statistics"
            " instead the runs agree",
        )
    if factor == "exchange policy":
        policy = "; ".join(run.first.policies) or "as given to `attach`"
        return Cause(
            "exchange policy", f"the exchange is not exact ({policy}): without it the runs agree"
        )
    where = "the model" if factor == "random state" else "the data that the model is given"
    seeds = seed_words(run)
    because = "" if seeds is None else f" ({seeds})"
    if (module := output_apart(one, run, step)) is not None:
        because += f" (workers along {run.shared_axes()} have other outputs of {module})"
    return Cause(
        "random state",
        f"random numbers in {where} depend on the worker{because}: with constants instead the runs"
        " agree",
    )
