"""The causes that `verify` can name, and the signatures of some in the numbers of two runs."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allstep.doctor.verify.compare import limit_of
from allstep.doctor.verify.record import RunRecord, WorkerRecord
from allstep.doctor.verify.sketch import NUM_PRODUCTS

Series = NDArray[np.float64]

_RATE_TOLERANCE = 1e-5

_CURES = {
    "learning rate scaled": "set the learning rate from the global batch, not from the workers",
    "loss summed": "take the mean over a worker's samples: `attach` takes the mean over workers"
    ' (`reduction="sum"` wants losses that are divided by the global batch)',
    "random state": "draw random numbers from (seed, step, sample), never from the rank;"
    " `allstep.steps` and `allstep.data.loader` do",
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
        """What to do about it."""
        return _CURES[self.name]


def peer_causes(run: RunRecord) -> list[Cause]:
    """Whether the workers of one run keep the same parameters, bit for bit."""
    for step in range(run.num_steps):
        for worker in run.workers[1:]:
            if worker.steps[step].checksum != run.first.steps[step].checksum:
                evidence = f"on {run.size} workers, rank {worker.rank}'s parameters leave rank 0's"
                return [Cause("workers apart", f"{evidence} at step {step}")]
    return []


def option_causes(one: RunRecord, other: RunRecord) -> list[Cause]:
    """What is wrong with the learning rate and the other options of the optimizer."""
    causes: dict[str, Cause] = {}
    few, many = _option_series(one), _option_series(other)
    for key in few:
        theirs = many.get(key, few[key])[: len(few[key])]
        mine = few[key][: len(theirs)]
        if np.allclose(mine, theirs, rtol=_RATE_TOLERANCE, atol=0, equal_nan=True):
            continue
        found = [_other_option(key, mine, theirs, other)]
        if key.startswith("lr "):
            found = _rate_causes(few[key], theirs, one, other)
        for cause in found:
            causes.setdefault(cause.name, cause)
    return list(causes.values())


def _option_series(run: RunRecord) -> dict[str, Series]:
    """Each option over the steps of its optimizer."""
    found: dict[str, list[float]] = {}
    for step in run.first.steps[: run.num_steps]:
        for i, group in enumerate(step.options):
            for key, value in group.items():
                found.setdefault(step.option_name(key, i), []).append(value)
    return {key: np.array(values) for key, values in found.items()}


def _other_option(key: str, mine: Series, theirs: Series, other: RunRecord) -> Cause:
    step = int(np.argmax(mine != theirs))
    values = f"{mine[step]:g} on the fewest workers and {theirs[step]:g} on {other.size}"
    return Cause("optimizer options", f"`{key}` is {values}")


def _rate_causes(few: Series, many: Series, one: RunRecord, other: RunRecord) -> list[Cause]:
    """A constant factor, the schedule run through faster, or both."""
    causes = []
    factor = _constant_factor(few[: len(many)], many)
    if factor is not None:
        causes.append(_scaled(factor, one, other))
    times, rest = divmod(other.size, one.size)
    ahead = few[::times]
    num = min(len(ahead), len(many))
    if rest or num < 2 or np.allclose(ahead[:num], few[:num], rtol=_RATE_TOLERANCE, atol=0):
        return causes
    faster = _constant_factor(ahead[:num], many[:num])
    if faster is None:
        return causes
    if not math.isclose(faster, 1, rel_tol=_RATE_TOLERANCE):
        causes.append(_scaled(faster, one, other))
    evidence = f"at step k on {other.size} workers the rate is that of step {times} k on {one.size}"
    return [
        *causes,
        Cause("scheduler", f"the scheduler is stepped {times} times a step: {evidence}"),
    ]


def _scaled(factor: float, one: RunRecord, other: RunRecord) -> Cause:
    workers = f"on {other.size} workers it is {factor:.4g} times that on {one.size}"
    return Cause("learning rate scaled", f"the learning rate is scaled by hand: {workers}")


def _constant_factor(few: Series, many: Series) -> float | None:
    """c if many = c few."""
    is_set = few != 0
    if not is_set.any():
        return None
    factor = float(np.median(many[is_set] / few[is_set]))
    fits = np.allclose(many, factor * few, rtol=_RATE_TOLERANCE, atol=0)
    return factor if fits else None


def data_causes(one: RunRecord, other: RunRecord) -> list[Cause]:
    """Whether workers ran each other's samples."""
    steps = range(min(one.num_steps, other.num_steps))
    if all(_are_equal(one, other, step) for step in steps):
        samples = other.samples(0)[0].total()
        who = "both" if other.size == 2 else f"all {other.size}"
        evidence = f"{who} workers ran the same {samples} samples in every step"
        return [Cause("data not sharded", evidence)]
    return _overlap(one, other, steps)


def _are_equal(one: RunRecord, other: RunRecord, step: int) -> bool:
    """Whether all workers ran the same samples, and these aren't what data like theirs give."""
    first, *others = other.samples(step)
    few = one.all_samples(step)
    are_equal = all(samples == first for samples in others)
    return len(few) > 1 and are_equal and other.all_samples(step) != few


def _overlap(one: RunRecord, other: RunRecord, steps: range) -> list[Cause]:
    """Whether workers ran some samples of others, though no sample was due twice."""
    few = sum((one.all_samples(step) for step in steps), Counter[int]())
    if len(few) != few.total():
        return []
    parts = [
        {sample for step in steps for sample in worker.steps[step].samples}
        for worker in other.workers
    ]
    num_shared = sum(map(len, parts)) - len(set().union(*parts))
    if not num_shared or other.all_samples(0) == one.all_samples(0):
        return []
    evidence = f"{num_shared} samples were run by several of the {other.size} workers"
    return [Cause("data not sharded", f"{evidence}, before any was due again")]


def gradient_causes(one: RunRecord, other: RunRecord, step: int) -> list[Cause]:
    """Why the gradients of a step differ, though its parameters agree."""
    mine, theirs = one.all_samples(step), other.all_samples(step)
    times = other.size / one.size
    dim = _batch_dim(one, other, step) if mine != theirs else 0
    if dim:  # rows are no samples: those of one worker have parts of those of another
        few, many = (sum(_num_samples(run, step, dim)) for run in (one, other))
        if few != many:
            return [_larger_batch(few, many, one, other)] if many == times * few else []
    elif mine != theirs:
        is_larger = mine and theirs.total() == times * mine.total()
        if is_larger:
            return [_larger_batch(mine.total(), theirs.total(), one, other)]
        known = set().union(*(one.all_samples(k) for k in range(step + 1)))
        if mine and theirs >= mine and known >= set(theirs):
            extra = f"{theirs.total() - mine.total()} of {theirs.total()} samples of step {step}"
            return [Cause("samples repeated", f"{extra} on {other.size} workers are repeats")]
        return []
    if not _are_finite(one, step) or not _are_finite(other, step):
        return []
    return _summed(one, other, step, times) or _unequal(one, other, step, dim)


def _larger_batch(few: int, many: int, one: RunRecord, other: RunRecord) -> Cause:
    batches = f"{few} samples on {one.size}, {many} on {other.size}"
    return Cause("global batch", f"a step's batch grows with the workers: {batches}")


def _batch_dim(one: RunRecord, other: RunRecord, step: int) -> int:
    """The dimension of the model's inputs that counts samples: the only one that differs."""
    shapes = one.input_shapes(step) + other.input_shapes(step)
    if len({len(shape) for shape in shapes}) != 1:
        return 0
    differing = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    return differing[0] if len(differing) == 1 else 0


def _num_samples(run: RunRecord, step: int, dim: int) -> list[int]:
    """Each worker's."""
    if not dim:
        return [samples.total() for samples in run.samples(step)]
    return [sum(shape[dim] for shape in worker.steps[step].input_shapes) for worker in run.workers]


def _are_finite(run: RunRecord, step: int) -> bool:
    """Whether all workers' own gradients are, so that one can reckon with them."""
    return all(
        np.isfinite(sketch.products).all()
        for worker in run.workers
        for sketch in worker.steps[step].local_gradients.values()
    )


def _summed(one: RunRecord, other: RunRecord, step: int, times: float) -> list[Cause]:
    """The same gradient, but for a factor."""
    few, many = _mean_gradients(one, other, step, [1] * one.size, [1] * other.size)
    squared = float(few @ few)
    factor = float(few @ many) / squared if squared else 0.0
    limit = limit_of(one, other)
    if not np.linalg.norm(many - factor * few) <= limit * np.linalg.norm(many):
        return []
    if not any(math.isclose(factor, x, rel_tol=10 * limit) for x in (times, 1 / times)):
        return []
    ratio = f"the gradient on {other.size} workers is {factor:.4g} times that on {one.size}"
    return [Cause("loss summed", f"the loss is summed, not averaged: {ratio}")]


def _unequal(one: RunRecord, other: RunRecord, step: int, dim: int) -> list[Cause]:
    """Weighed by samples, the workers' gradients give the right one."""
    counts = _num_samples(other, step, dim)
    if len(set(counts)) == 1:
        return []
    few, many = _mean_gradients(one, other, step, _num_samples(one, step, dim), counts)
    limit = limit_of(one, other)
    if not few.any() or not np.linalg.norm(many - few) <= limit * np.linalg.norm(few):
        return []
    evidence = (
        f"at step {step} the workers have {' and '.join(map(str, counts))} samples, and the"
        " gradient is the mean of their means; weighed by samples it would be right"
    )
    return [Cause("unequal shards", evidence)]


def _mean_gradients(
    one: RunRecord,
    other: RunRecord,
    step: int,
    weights: Sequence[int],
    other_weights: Sequence[int],
) -> tuple[Series, Series]:
    """The workers' own gradients, as they were before the exchange, averaged; of both runs."""
    workers = (*one.workers, *other.workers)
    names = sorted({name for worker in workers for name in worker.steps[step].local_gradients})
    return (
        _mean_gradient(one.workers, step, weights, names),
        _mean_gradient(other.workers, step, other_weights, names),
    )


def _mean_gradient(
    workers: Sequence[WorkerRecord], step: int, weights: Sequence[int], names: Sequence[str]
) -> Series:
    means = np.zeros((len(names), NUM_PRODUCTS))
    for worker, weight in zip(workers, weights, strict=True):
        local = worker.steps[step].local_gradients
        for mean, name in zip(means, names, strict=True):
            if name in local:
                mean += weight / sum(weights) * np.array(local[name].products)
    return means.reshape(-1)
