"""The causes that `verify` can name, and signatures in options and parameters."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from allstep.doctor.verify.record import RunRecord

Series = NDArray[np.float64]

_RATE_TOLERANCE = 1e-5
_FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_CURES = {
    "learning rate scaled": "set the learning rate from the global batch, not from the workers",
    "loss summed": "take the mean over a worker's samples: `attach` takes the mean over workers"
    ' (`reduction="sum"` wants losses that are divided by the global batch)',
    "random state": "draw random numbers from (seed, step, sample), never from the rank;"
    " `allstep.steps` and `allstep.data.loader` do; have no dropout of features that are divided"
    " over workers",
    "unequal shards": "weigh each worker's mean loss by its samples, or drop the last batch;"
    " `batch.backward` of `allstep.steps` weighs",
    "batch norm": "take statistics over groups of fixed size: fixed micro-batches with"
    " `allstep.steps`, or `allstep.nn`'s batch norms",
    "scheduler": "step the scheduler once for each step of the optimizer",
    "data not sharded": "give each worker its own part: `allstep.data.loader` with the workers'"
    " communicator, or a DistributedSampler",
    "global batch": "give each worker global batch / workers samples",
    "exchange policy": "this is what was asked for; compare accuracy, not numbers",
    "optimizer options": "give the optimizer the same options on any number of workers",
    "workers apart": "make every update from `p.grad` and from what is the same on all workers",
    "initial parameters": "make the model alike on any number of workers: seed its making, and let"
    " its shape and its values not depend on the workers",
    "number format": "compute in the same format on any number of workers",
    "unequal amounts": "weigh each worker's sum by what all workers have together (tokens, class"
    " weights), not by what it has itself",
    "gradient changed": "leave `p.grad` as `attach` leaves it, which has taken the mean already;"
    " what scales or clips it must not depend on the workers",
    "seed depends on rank": "seed all workers alike, and give each its own samples:"
    " `allstep.data.loader`, or a DistributedSampler; random numbers of a step come from (seed,"
    " step, sample)",
    "other batches": "take each global batch from one order of the samples that doesn't depend on"
    " the workers, and draw noise in a sample by the global generators of torch, numpy and Python:"
    " `allstep.data.loader` sees to the order, and seeds these for each sample",
    "wrong part": "load of each whole parameter the part of this worker's place on the axis",
    "sum missing": "sum the gradient over the axis: parameters that are whole on workers which"
    " share a copy go through `allstep.nn.replicated`, or the layers through"
    " `allstep.nn.tensor_parallel`",
    "sum repeated": "sum the gradient over the axis once",
    "loss scaled along an axis": "count each loss once: with `tensor_parallel` every worker has the"
    " whole loss, and with `allstep.comm.autograd` an equal part of it",
    "bias repeated": "add the bias once, after the sum over the axis",
    "samples repeated": "drop the last batch, or use a sampler that doesn't fill up its parts;"
    " `allstep.data.loader` gives each sample once",
}


@dataclass(frozen=True)
class Cause:
    """A likely cause.

    Attributes:
        name: which; one of those that have a cure.
        evidence: what was seen.
    """

    name: str
    evidence: str

    def __post_init__(self) -> None:
        assert self.name in _CURES

    @property
    def cure(self) -> str:
        """The cure."""
        return _CURES[self.name]


def agree(x: Series, y: Series, limit: float) -> bool:
    """Whether two numbers differ by no more than rounding, relative to the second."""
    return bool(np.linalg.norm(x - y) <= limit * np.linalg.norm(y))


def peer_causes(run: RunRecord) -> list[Cause]:
    """The cause, if workers of one run, or copies of the model, have different parameters."""
    for step in range(run.num_steps):
        for worker in run.workers[1:]:
            peer = next(other for other in run.workers if other.place == worker.place)
            if worker.steps[step].checksum != peer.steps[step].checksum:
                evidence = f"on {run}, rank {worker.rank}'s parameters leave rank {peer.rank}'s"
                return [Cause("workers apart", f"{evidence} at step {step}")]
    return []


def format_causes(one: RunRecord, other: RunRecord) -> list[Cause]:
    """The cause, if the models compute in different number formats."""
    names = {torch.finfo(dtype).eps: str(dtype) for dtype in _FORMATS}
    epsilons = [max(worker.epsilon for worker in run.workers) for run in (one, other)]
    few, many = (names.get(epsilon, "") for epsilon in epsilons)
    if few == many or not (few and many):
        return []
    evidence = f"the coarsest is {few} on {one} and {many} on {other}"
    return [Cause("number format", evidence)]


def seed_words(run: RunRecord) -> str | None:
    """The difference of the workers' random states in words; None if they are equal."""
    first = run.first
    for worker in run.workers[1:]:
        for mine, theirs in zip(first.torch_seeds, worker.torch_seeds, strict=False):
            if mine != theirs:
                return f"torch's seed is {mine} on rank 0 and {theirs} on rank {worker.rank}"
        for library, state in first.random_states.items():
            if worker.random_states.get(library) != state:
                return f"the random state of {library} is another on rank {worker.rank}"
    return None


def option_causes(one: RunRecord, other: RunRecord) -> list[Cause]:
    """Causes in the learning rate and the optimizer's other options."""
    causes: dict[str, Cause] = {}
    kinds = [_options_of_first_step(run) for run in (one, other)]
    if all(kinds) and (odd := sorted(kinds[0] ^ kinds[1])):
        evidence = f"`{odd[0]}` is an option only on {one if odd[0] in kinds[0] else other}"
        return [Cause("optimizer options", f"the optimizer is another one: {evidence}")]
    few, many = _option_series(one), _option_series(other)
    for key in few:
        theirs = many.get(key, few[key])[: len(few[key])]
        mine = few[key][: len(theirs)]
        if np.allclose(mine, theirs, rtol=_RATE_TOLERANCE, atol=0, equal_nan=True):
            continue
        step = int(np.argmax(mine != theirs))
        values = f"{mine[step]:g} on {one} and {theirs[step]:g} on {other}"
        found = [Cause("optimizer options", f"`{key}` is {values}")]
        if key.startswith("lr "):
            found = _rate_causes(few[key], theirs, one, other)
        for cause in found:
            causes.setdefault(cause.name, cause)
    return list(causes.values())


def _options_of_first_step(run: RunRecord) -> set[str]:
    """Names of the options of the first optimizer's first step."""
    if not run.num_steps:
        return set()
    first = run.first.steps[0]
    return {first.option_name(key, i) for i, of in enumerate(first.options) for key in of}


def _option_series(run: RunRecord) -> dict[str, Series]:
    """Each option over the steps of its optimizer."""
    found: dict[str, list[float]] = {}
    for step in run.first.steps[: run.num_steps]:
        for i, group in enumerate(step.options):
            for key, value in group.items():
                found.setdefault(step.option_name(key, i), []).append(value)
    return {key: np.array(values) for key, values in found.items()}


def _rate_causes(few: Series, many: Series, one: RunRecord, other: RunRecord) -> list[Cause]:
    """Causes in the rate: a constant factor, a schedule that runs faster, or both."""
    causes = []
    factor = _constant_factor(few[: len(many)], many)
    if factor is not None:
        causes.append(_scaled(factor, one, other))
    times, rest = divmod(len(other.copies), len(one.copies))
    ahead = few[::times]
    num = min(len(ahead), len(many))
    if rest or num < 2 or np.allclose(ahead[:num], few[:num], rtol=_RATE_TOLERANCE, atol=0):
        return causes
    faster = _constant_factor(ahead[:num], many[:num])
    if faster is None:
        return causes
    if not math.isclose(faster, 1, rel_tol=_RATE_TOLERANCE):
        causes.append(_scaled(faster, one, other))
    evidence = f"at step k on {other} the rate is that of step {times} k on {one}"
    return [
        *causes,
        Cause("scheduler", f"the scheduler is stepped {times} times a step: {evidence}"),
    ]


def _scaled(factor: float, one: RunRecord, other: RunRecord) -> Cause:
    workers = f"on {other} it is {factor:.4g} times that on {one}"
    return Cause("learning rate scaled", f"the learning rate is scaled by hand: {workers}")


def _constant_factor(few: Series, many: Series) -> float | None:
    """c if many = c few."""
    is_set = few != 0
    if not is_set.any():
        return None
    factor = float(np.median(many[is_set] / few[is_set]))
    fits = np.allclose(many, factor * few, rtol=_RATE_TOLERANCE, atol=0)
    return factor if fits else None
