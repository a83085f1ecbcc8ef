"""Whether two runs train the same model, and if not, why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allstep.doctor.verify.ablation import Factor
from allstep.doctor.verify.causes import (
    Cause,
    data_causes,
    gradient_causes,
    option_causes,
    peer_causes,
)
from allstep.doctor.verify.compare import Divergence, find_divergence, nonfinite_step
from allstep.doctor.verify.record import RunRecord

_CAUSES_OF_GRADIENTS = ("data not sharded", "workers apart")
_RANDOM_DATA: tuple[Factor, ...] = ("random data", "random loader")

# Runs both again for some steps, without the factors.
Rerun = Callable[[Sequence[Factor], int], tuple[RunRecord, RunRecord]]


@dataclass(frozen=True)
class Diagnosis:
    """What came of comparing a run with the one on the fewest workers.

    Attributes:
        size: workers of the run.
        divergence: where they first differ, or None.
        causes: the likely ones; none of a model that is the same, or if no cause fits.
        is_explained: whether the causes account for the divergence.
        nonfinite_at: the step from which neither run is finite, and nothing was compared; or None.
    """

    size: int
    divergence: Divergence | None
    causes: list[Cause]
    is_explained: bool
    nonfinite_at: int | None = None

    @property
    def is_same(self) -> bool:
        """Whether all is well: the same model, and no worker did another's work."""
        return self.divergence is None and not self.causes


def diagnose(one: RunRecord, other: RunRecord, rerun: Rerun) -> Diagnosis:
    """Compares a script's first steps on two numbers of workers.

    Signatures in the numbers come first. Where they say nothing about a gradient that differs,
    both runs are made again without batch norm, without random numbers or without the
    exchange's policy: a factor without which they agree is the cause.

    Args:
        one: the run on the fewest workers.
        other: on more; one of them is finite after the first step.
        rerun: makes both again.
    """
    nonfinite_at = nonfinite_step(one, other)
    if nonfinite_at is not None:
        one, other = one.before(nonfinite_at), other.before(nonfinite_at)
    divergence = find_divergence(one, other)
    causes = option_causes(one, other)
    if not other.first.policies:
        causes += peer_causes(other)
    causes += data_causes(one, other)
    is_explained = divergence is None or bool(causes)
    if divergence is not None and divergence.quantity == "gradient":
        is_explained = any(cause.name in _CAUSES_OF_GRADIENTS for cause in causes)
        if not is_explained:
            found = _causes_of_gradient(one, other, divergence.step, rerun)
            is_explained = bool(found)
            causes += found
    return Diagnosis(other.size, divergence, causes, is_explained, nonfinite_at)


def _causes_of_gradient(one: RunRecord, other: RunRecord, step: int, rerun: Rerun) -> list[Cause]:
    causes = gradient_causes(one, other, step)
    if causes:
        return causes
    factors = _factors(one, other, step)
    for attempt in _attempts(factors):
        last = max(step, 1) if "random data" in attempt else step  # which empties the first
        others = _causes_without(one, *rerun(attempt, last + 1), last)
        if others is not None:
            return [_as_cause(factor, other) for factor in attempt] + others
    return []


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
    """What else is wrong without the factors; None if they are not the cause."""
    nonfinite_at = nonfinite_step(one, other)
    if step >= min(one.num_steps, other.num_steps) or nonfinite_at is not None:
        return None
    if len(before.all_samples(step)) > 1 and len(one.all_samples(step)) < 2:
        return None  # the data were made of random numbers: nothing is left of them
    divergence = find_divergence(one, other, quantities=("gradient",))
    if divergence is None:
        return []
    return gradient_causes(one, other, divergence.step) or None


def _as_cause(factor: Factor, run: RunRecord) -> Cause:
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
    return Cause(
        "random state",
        f"random numbers in {where} depend on the worker: with constants instead the runs agree",
    )
