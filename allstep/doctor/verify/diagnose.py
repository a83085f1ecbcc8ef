"""Whether two runs train the same model, and if not, why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allstep.doctor.verify.causes import Cause
from allstep.doctor.verify.compare import Parting, divergence, find_parting
from allstep.doctor.verify.record import Run
from allstep.doctor.verify.removal import Suspect
from allstep.doctor.verify.signatures import (
    data_causes,
    gradient_causes,
    option_causes,
    peer_causes,
)

__all__ = ["Diagnosis", "Rerun", "diagnose"]

_CAUSES_OF_GRADIENTS = ("data not sharded", "workers apart")
_RANDOM_DATA: tuple[Suspect, ...] = ("random data", "random loader")

# Runs both again for some steps, without the suspects.
Rerun = Callable[[Sequence[Suspect], int], tuple[Run, Run]]


@dataclass(frozen=True)
class Diagnosis:
    """What came of comparing a run with the one on the fewest workers.

    Attributes:
        size: workers of the run.
        parting: where they part first, or None.
        causes: the likely ones; none of a model that is the same, or if no cause fits.
        is_explained: whether the causes account for the parting.
        diverges_at: the step from which neither run is finite, and nothing was compared; or None.
    """

    size: int
    parting: Parting | None
    causes: list[Cause]
    is_explained: bool
    diverges_at: int | None = None

    @property
    def is_same(self) -> bool:
        """Whether all is well: the same model, and no worker did another's work."""
        return self.parting is None and not self.causes


def diagnose(one: Run, other: Run, rerun: Rerun) -> Diagnosis:
    """Compares a script's first steps on two numbers of workers.

    Signatures in the numbers come first. Where they say nothing about a gradient that parts,
    both runs are made again without batch norm, without random numbers or without the
    exchange's policy: a suspect without which they agree is the cause.

    Args:
        one: the run on the fewest workers.
        other: on more; not both diverge in the first step.
        rerun: makes both again.
    """
    diverges_at = divergence(one, other)
    if diverges_at is not None:
        one, other = one.before(diverges_at), other.before(diverges_at)
    parting = find_parting(one, other)
    causes = option_causes(one, other)
    if not other.first.policies:
        causes += peer_causes(other)
    causes += data_causes(one, other)
    is_explained = parting is None or bool(causes)
    if parting is not None and parting.quantity == "gradient":
        is_explained = any(cause.name in _CAUSES_OF_GRADIENTS for cause in causes)
        if not is_explained:
            found = _causes_of_gradient(one, other, parting.step, rerun)
            is_explained = bool(found)
            causes += found
    return Diagnosis(other.size, parting, causes, is_explained, diverges_at)


def _causes_of_gradient(one: Run, other: Run, step: int, rerun: Rerun) -> list[Cause]:
    causes = gradient_causes(one, other, step)
    if causes:
        return causes
    suspects = _suspects(one, other, step)
    for attempt in _attempts(suspects):
        last = max(step, 1) if "random data" in attempt else step  # which empties the first
        others = _causes_without(one, *rerun(attempt, last + 1), last)
        if others is not None:
            return [_as_cause(suspect, other) for suspect in attempt] + others
    return []


def _suspects(one: Run, other: Run, step: int) -> list[Suspect]:
    suspects: list[Suspect] = []
    if other.first.policies:
        suspects.append("exchange policy")
    if other.first.num_batch_norms:
        suspects.append("batch norm")
    has_same_samples = one.all_samples(step) == other.all_samples(step)
    return [*suspects, "random state"] if has_same_samples else [*suspects, *_RANDOM_DATA]


def _attempts(suspects: Sequence[Suspect]) -> list[list[Suspect]]:
    """Each suspect alone, and then with all the others; of random data one kind at a time."""
    alone = [[suspect] for suspect in suspects]
    others = [suspect for suspect in suspects if suspect not in _RANDOM_DATA]
    random = [suspect for suspect in suspects if suspect in _RANDOM_DATA]
    together = [[*others, suspect] for suspect in random] or [others]
    return alone + [attempt for attempt in together if len(attempt) > 1]


def _causes_without(before: Run, one: Run, other: Run, step: int) -> list[Cause] | None:
    """What else is wrong without the suspects; None if they weren't to blame."""
    diverges_at = divergence(one, other)
    if step >= min(one.num_steps, other.num_steps) or diverges_at is not None:
        return None
    if len(before.all_samples(step)) > 1 and len(one.all_samples(step)) < 2:
        return None  # the data were made of random numbers: nothing is left of them
    parting = find_parting(one, other, quantities=("gradient",))
    if parting is None:
        return []
    return gradient_causes(one, other, parting.step) or None


def _as_cause(suspect: Suspect, run: Run) -> Cause:
    if suspect == "batch norm":
        return Cause(
            "batch norm",
            "each worker's batch norm sees its own samples alone: with running statistics"
            " instead the runs agree",
        )
    if suspect == "exchange policy":
        policy = "; ".join(run.first.policies) or "as given to `attach`"
        return Cause(
            "exchange policy", f"the exchange is not exact ({policy}): without it the runs agree"
        )
    where = "the model" if suspect == "random state" else "the data that the model is given"
    return Cause(
        "random state",
        f"random numbers in {where} depend on the worker: with constants instead the runs agree",
    )
