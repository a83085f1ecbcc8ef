"""Whether two runs train the same model, and if not, why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allstep.doctor.verify.causes import Cause
from allstep.doctor.verify.compare import Parting, find_parting
from allstep.doctor.verify.record import Run
from allstep.doctor.verify.removal import Suspect
from allstep.doctor.verify.signatures import (
    data_causes,
    gradient_causes,
    option_causes,
    peer_causes,
)

__all__ = ["Diagnosis", "Rerun", "diagnose"]

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
    """

    size: int
    parting: Parting | None
    causes: list[Cause]
    is_explained: bool

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
        other: on more.
        rerun: makes both again.
    """
    parting = find_parting(
        one, other, quantities=("initial parameters", "options", "gradient", "parameters")
    )
    causes = option_causes(one, other)
    has_policy = bool(other.first.policies)
    if not has_policy:
        causes += peer_causes(other)
    causes += data_causes(one, other)
    step = _gradient_parting(one, other)
    is_explained = bool(causes)
    if step is not None:
        found = _causes_of_gradient(one, other, step, rerun)
        causes += found
        is_explained = bool(found) or _explains_gradient(causes)
    return Diagnosis(other.size, parting, causes, is_explained)


def _gradient_parting(one: Run, other: Run) -> int | None:
    """The first step whose gradients part, if nothing else has parted before."""
    first = find_parting(one, other, quantities=("initial parameters", "gradient", "parameters"))
    return first.step if first is not None and first.quantity == "gradient" else None


def _explains_gradient(causes: Sequence[Cause]) -> bool:
    return any(cause.name in ("data not sharded", "workers apart") for cause in causes)


def _causes_of_gradient(one: Run, other: Run, step: int, rerun: Rerun) -> list[Cause]:
    if data_causes(one, other):
        return []  # other samples give other gradients
    causes = gradient_causes(one, other, step)
    if causes:
        return causes
    suspects = _suspects(one, other, step)
    attempts = [[suspect] for suspect in suspects]
    if len(suspects) > 1:
        attempts.append(suspects)
    for attempt in attempts:
        again = rerun(attempt, step + 1)
        others = _causes_without(one, *again, step)
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
    suspects.append("random state" if has_same_samples else "random data")
    return suspects


def _causes_without(before: Run, one: Run, other: Run, step: int) -> list[Cause] | None:
    """What else is wrong without the suspects; None if they weren't to blame."""
    if step >= min(one.num_steps, other.num_steps):
        return None
    if len(before.all_samples(step)) > 1 and len(one.all_samples(step)) < 2:
        return None  # the data were made of random numbers: nothing is left of them
    parted = _gradient_parting(one, other)
    if parted is None:
        return []
    return gradient_causes(one, other, parted) or None


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
