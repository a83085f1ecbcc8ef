"""Signatures of causes in the samples and the gradients of two runs."""

import math
from collections.abc import Sequence

import numpy as np

from allstep.doctor.verify.causes import Cause, Series, agree, seed_words
from allstep.doctor.verify.compare import gradient_difference, limit_of, total_norm
from allstep.doctor.verify.record import RunRecord, WorkerRecord
from allstep.doctor.verify.sketch import NUM_PRODUCTS

_CLEARLY = 30.0  # limits


def data_causes(one: RunRecord, other: RunRecord) -> list[Cause]:
    """The cause, if workers ran each other's samples."""
    steps = range(min(one.num_steps, other.num_steps))
    if all(_are_equal(one, other, step) for step in steps):
        samples = other.samples(0)[0].total()
        who = "both" if len(other.copies) == 2 else f"all {len(other.copies)}"
        evidence = f"{who} workers ran the same {samples} samples in every step"
        return [Cause("data not sharded", evidence)]
    return _overlap(one, other, steps)


def _are_equal(one: RunRecord, other: RunRecord, step: int) -> bool:
    """Whether all workers ran the same samples, and not because the data repeat."""
    first, *others = other.samples(step)
    few = one.all_samples(step)
    are_equal = all(samples == first for samples in others)
    return len(few) > 1 and are_equal and other.all_samples(step) != few


def _overlap(one: RunRecord, other: RunRecord, steps: range) -> list[Cause]:
    """Whether workers ran samples of others, though no sample was due twice."""
    steps = _first_pass(one, other, steps)
    parts = [
        {sample for step in steps for sample in worker.steps[step].samples}
        for worker in other.copies
    ]
    num_shared = sum(map(len, parts)) - len(set().union(*parts))
    if not num_shared or other.all_samples(0) == one.all_samples(0):
        return []
    evidence = f"{num_shared} samples were run by several of the {len(other.copies)} workers"
    return [Cause("data not sharded", f"{evidence}, before any was due again")]


def _first_pass(one: RunRecord, other: RunRecord, steps: range) -> range:
    """The first steps, before the run or a worker of the other has a sample again."""
    seen: list[set[int]] = [set() for _ in range(1 + len(other.copies))]
    for step in steps:
        for known, samples in zip(seen, [one.all_samples(step), *other.samples(step)], strict=True):
            if len(samples) < samples.total() or known & set(samples):
                return range(step)
            known |= set(samples)
    return steps


def gradient_causes(one: RunRecord, other: RunRecord, step: int) -> list[Cause]:
    """Why the gradients of a step differ, though its parameters agree."""
    mine, theirs = one.all_samples(step), other.all_samples(step)
    times = len(other.copies) / len(one.copies)
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
            return [Cause("samples repeated", f"{extra} on {other} are repeats")]
        if mine and theirs and mine.total() != theirs.total():
            return [_larger_batch(mine.total(), theirs.total(), one, other)]
        return _unequal_amounts(one, other, step)  # padded otherwise, samples look like others
    return (
        _summed(one, other, step, times)
        or _unequal(one, other, step, dim)
        or _unequal_amounts(one, other, step)
        or _changed(one, other, step)
    )


def _larger_batch(few: int, many: int, one: RunRecord, other: RunRecord) -> Cause:
    batches = f"{few} samples on {one}, {many} on {other}"
    return Cause("global batch", f"a step's batch depends on the workers: {batches}")


def _batch_dim(one: RunRecord, other: RunRecord, step: int) -> int:
    """The dimension of the model's inputs that counts samples: the only one that differs."""
    shapes = one.input_shapes(step) + other.input_shapes(step)
    if len({len(shape) for shape in shapes}) != 1:
        return 0
    differing = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    return differing[0] if len(differing) == 1 else 0


def _num_samples(run: RunRecord, step: int, dim: int) -> list[int]:
    """Each worker's number of samples."""
    if not dim:
        return [samples.total() for samples in run.samples(step)]
    return [sum(shape[dim] for shape in worker.steps[step].input_shapes) for worker in run.copies]


def _are_finite(run: RunRecord, step: int) -> bool:
    """Whether all workers' own gradients are finite."""
    return all(
        np.isfinite(sketch.products).all()
        for worker in run.copies
        for sketch in worker.steps[step].local_gradients.values()
    )


def _summed(one: RunRecord, other: RunRecord, step: int, times: float) -> list[Cause]:
    """The cause, if the gradients differ by a factor."""
    if (both := _mean_gradients(one, other, step)) is None:
        return []
    few, many = both
    squared = float(few @ few)
    factor = float(few @ many) / squared if squared else 0.0
    limit = limit_of(one, other)
    if not agree(factor * few, many, limit):
        return []
    factors = () if times == 1 else (times, 1 / times)
    if not any(math.isclose(factor, x, rel_tol=10 * limit) for x in factors):
        return []
    ratio = f"the gradient on {other} is {factor:.4g} times that on {one}"
    return [Cause("loss summed", f"the loss is summed, not averaged: {ratio}")]


def _unequal(one: RunRecord, other: RunRecord, step: int, dim: int) -> list[Cause]:
    """The cause, if the workers' gradients weighed by samples give the right one."""
    counts = _num_samples(other, step, dim)
    if len(set(counts)) == 1:
        return []
    both = _mean_gradients(one, other, step, _num_samples(one, step, dim), counts)
    if both is None:
        return []
    few, many = both
    if not few.any() or not agree(many, few, limit_of(one, other)):
        return []
    evidence = (
        f"at step {step} the workers have {' and '.join(map(str, counts))} samples, and the"
        " gradient is the mean of their means; weighed by samples it would be right"
    )
    return [Cause("unequal shards", evidence)]


def _unequal_amounts(one: RunRecord, other: RunRecord, step: int) -> list[Cause]:
    """Weighed by some shares, which are no samples, the workers' gradients give the right one."""
    names = sorted({name for w in other.copies for name in w.steps[step].local_gradients})
    are_finite = _are_finite(one, step) and _are_finite(other, step)
    if len(one.copies) > 1 or not names or not are_finite:
        return []
    few = _mean_gradient(one.copies, step, [1], names)
    each = np.stack([_mean_gradient([w], step, [1], names) for w in other.copies], axis=1)
    shares, _, rank, _ = np.linalg.lstsq(each, few)
    limit = limit_of(one, other)
    if rank < len(other.copies) or len(few) < 4 * len(other.copies) or shares.min() < 0:
        return []
    if not agree(each @ shares, few, limit):
        return []
    is_mean = math.isclose(shares.sum(), 1, rel_tol=10 * limit)
    if not is_mean or np.ptp(shares) < _CLEARLY * limit / len(other.copies):
        return []
    weights = " and ".join(f"{share:.3f}" for share in shares)
    evidence = (
        "the loss is a mean over something of which the workers have unequal amounts: weighed by"
        f" {weights} their gradients would give the right one"
    )
    return [Cause("unequal amounts", evidence)]


def _changed(one: RunRecord, other: RunRecord, step: int) -> list[Cause]:
    """The workers' own gradients have the right mean, but the optimizer finds something else."""
    both = _mean_gradients(one, other, step)
    if other.first.policies or both is None:
        return []
    few, many = both
    limit = limit_of(one, other)
    if not few.any() or not agree(many, few, limit):
        return []
    if gradient_difference(one, other, step) < _CLEARLY * limit:
        return []  # of some tensors, whose workers' means may be as far apart
    norms = [total_norm(run.first.steps[step].gradients) for run in (one, other)]
    evidence = (
        "the workers' own gradients have the right mean, but what the optimizer finds has the norm"
        f" {norms[1]:.4g} on {other} and {norms[0]:.4g} on {one}"
    )
    return [Cause("gradient changed", evidence)]


def stream_causes(one: RunRecord, other: RunRecord, step: int) -> list[Cause]:
    """Each worker draws samples of its own stream: rank 0 those of a single worker, others not."""
    words = seed_words(other)
    are_known = _samples_are_known(one, other, step)
    if words is None or not are_known[0] or any(are_known[1:]):
        return []
    evidence = f"{words}, and only rank 0 runs samples that are run on {one}"
    return [Cause("seed depends on rank", evidence)]


def batch_causes(one: RunRecord, other: RunRecord, step: int) -> list[Cause]:
    """What can be said of other data where nothing else explains them."""
    mine, theirs = one.all_samples(step), other.all_samples(step)
    lengths = [{tuple(s[1:]) for s in run.input_shapes(step)} for run in (one, other)]
    if mine == theirs or mine.total() != theirs.total() or lengths[0] != lengths[1]:
        return []
    words = seed_words(other)
    if words is not None:
        return [Cause("seed depends on rank", f"{words}, and the data are others")]
    known = set().union(*(one.all_samples(k) for k in range(one.num_steps)))
    are_known = _samples_are_known(one, other, step)
    is_chosen = any(are_known) and None not in are_known  # a change would be of any worker's
    are_all_known = known >= set(theirs)
    if not is_chosen and not are_all_known:
        return []
    common = f"{(mine & theirs).total()} of {theirs.total()} samples of step {step}"
    own = "an order" if are_all_known else "an order, or a generator of random numbers,"
    evidence = f"only {common} are those on {one}: does each worker have {own} of its own?"
    return [Cause("other batches", evidence)]


def _samples_are_known(one: RunRecord, other: RunRecord, step: int) -> list[bool | None]:
    """Whether each worker's samples are of the other run's step; None if only some are."""
    mine = set(one.all_samples(step))
    found: list[bool | None] = []
    for samples in other.samples(step):
        num_known = len(mine & set(samples))
        found.append(num_known > 0 if num_known in (0, len(samples)) else None)
    return found


def _mean_gradients(
    one: RunRecord,
    other: RunRecord,
    step: int,
    weights: Sequence[int] | None = None,
    other_weights: Sequence[int] | None = None,
) -> tuple[Series, Series] | None:
    """The workers' own gradients, as they were before the exchange, averaged; of both runs.

    None if some are not finite.
    """
    if not _are_finite(one, step) or not _are_finite(other, step):
        return None
    workers = (*one.copies, *other.copies)
    names = sorted({name for worker in workers for name in worker.steps[step].local_gradients})
    return (
        _mean_gradient(one.copies, step, weights or [1] * len(one.copies), names),
        _mean_gradient(other.copies, step, other_weights or [1] * len(other.copies), names),
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
