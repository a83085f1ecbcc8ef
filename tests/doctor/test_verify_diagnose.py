"""Causes from signatures and from ablated runs."""

import math
from dataclasses import replace

import pytest

from allstep.doctor import RunRecord, WorkerRecord, diagnose
from allstep.doctor.verify.causes import option_causes
from allstep.doctor.verify.gradients import batch_causes, gradient_causes
from allstep.errors import UsageError
from tests.doctor.trainings import options, steps_with


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_runs_that_stop_being_finite_are_compared_up_to_there(bad):
    def refuse(factors, steps):
        raise AssertionError("nothing is left to find")

    same = diagnose(steps_with([1, 2, bad, bad]), steps_with([1, 2, bad, bad, bad]), refuse)
    assert same.is_same
    assert (same.nonfinite_at, same.divergence) == (2, None)
    # A rate that is no number is the same in both, too.
    rates = [steps_with([1, bad], rate=math.nan) for _ in range(2)]
    assert diagnose(*rates, refuse).is_same


def test_divergence_before_both_runs_stop_being_finite():
    def rerun(factors, steps):
        return steps_with([1] * steps), steps_with([2] * steps)

    bad = math.nan
    found = diagnose(steps_with([1, 2, bad]), steps_with([1, 3, bad]), rerun)
    assert (found.is_same, found.divergence.step, found.nonfinite_at) == (False, 1, 2)
    # One of them stops being finite earlier: that is where they diverge.
    found = diagnose(steps_with([1, bad, bad]), steps_with([1, 2, bad]), rerun)
    assert (found.divergence.step, found.divergence.difference) == (1, math.inf)


def test_ablated_runs_that_are_not_finite_name_no_cause():
    """They agree on nothing but infinity."""

    def rerun(factors, steps):
        return steps_with([math.inf] * steps), steps_with([math.inf] * steps)

    one, other = steps_with([1, 1]), steps_with([2, 2])
    other.first.policies.append("fp16")
    assert diagnose(one, other, rerun).causes == []
    right = diagnose(one, other, lambda factors, steps: (one, one))
    assert [cause.name for cause in right.causes] == ["exchange policy"]


@pytest.mark.parametrize(
    ("few", "many", "causes"),
    [
        ([1, 1, 1, 1, 1], [2, 2, 2], ["learning rate scaled"]),
        ([1, 1, 1, 1, 1], [1.4142, 1.4142, 1.4142], ["learning rate scaled"]),
        ([16, 8, 4, 2, 1], [16, 4, 1], ["scheduler"]),
        ([16, 8, 4, 2, 1], [32, 8, 2], ["learning rate scaled", "scheduler"]),
        # A warm-up from zero, twice as fast or twice as high: it could be either.
        ([0, 1, 2, 3, 4], [0, 2, 4], ["learning rate scaled", "scheduler"]),
        ([1, 2, 3, 4, 5], [1, 3, 3.5], []),
        ([0, 0, 0], [1, 1, 1], []),
        ([3, 2, 1], [3, 2, 1], []),
    ],
)
def test_option_causes_of_learning_rates(few, many, causes):
    found = option_causes(options(few, 1), options(many, 2))
    assert [cause.name for cause in found] == causes


def test_option_causes_tell_optimizers_apart():
    """Steps of two take turns; the second's rate is scaled."""

    def run(size, factor):
        steps = options([1.0, 8.0 * factor, 0.5, 4.0 * factor], size)
        for worker in steps.workers:
            turns = [replace(step, optimizer=i % 2) for i, step in enumerate(worker.steps)]
            worker.steps[:] = turns
        return steps

    assert option_causes(run(1, 1), run(2, 1)) == []
    (cause,) = option_causes(run(1, 1), run(2, 2))
    assert cause.name == "learning rate scaled"


def inputs(shapes: list[list[int]], gradients: list[float]) -> RunRecord:
    """A step whose workers have inputs of these shapes and gradients that are one number."""
    workers = []
    for rank, (shape, value) in enumerate(zip(shapes, gradients, strict=True)):
        record = WorkerRecord(rank=rank)
        step = steps_with([value]).first.steps[0]
        rows = [hash((rank, tuple(shape), i)) for i in range(shape[0])]
        record.steps = [replace(step, samples=rows, input_shapes=[shape])]
        workers.append(record)
    return RunRecord(workers)


@pytest.mark.parametrize(
    ("shapes", "gradients", "causes"),
    [
        ([[7, 8, 3], [7, 8, 3]], [0.5, 0.5], ["loss summed"]),
        ([[7, 12, 3], [7, 4, 3]], [4 / 3, 0.0], ["unequal shards"]),
        ([[7, 16, 3], [7, 16, 3]], [1.0, 1.0], ["global batch"]),
        ([[7, 8, 3], [7, 24, 3]], [1.0, 1.0], ["global batch"]),
        ([[7, 8, 3], [7, 8, 3]], [3.0, 0.0], []),
    ],
)
def test_gradient_causes_with_samples_along_the_second_dimension(shapes, gradients, causes):
    """As `nn.LSTM` takes them: seven steps of time, sixteen samples."""
    found = gradient_causes(inputs([[7, 16, 3]], [1.0]), inputs(shapes, gradients), 0)
    assert [cause.name for cause in found] == causes


def samples_of(*steps: list[list[int]]) -> RunRecord:
    """Of each worker in each step."""
    few = steps_with([1.0]).first.steps[0]
    workers = [WorkerRecord(rank=rank) for rank in range(len(steps[0]))]
    for worker in workers:
        worker.steps = [
            replace(few, samples=step[worker.rank], input_shapes=[[len(step[worker.rank]), 3]])
            for step in steps
        ]
    return RunRecord(workers)


@pytest.mark.parametrize(
    ("second_worker", "words"),
    [([5, 6], "an order of its own?"), ([93, 94], "or a generator of random numbers, of its own?")],
)
def test_other_batches_may_be_other_noise_in_the_same_samples(second_worker, words):
    """Samples that no step of the other run had need not be of an order."""
    one = samples_of([[1, 2, 3, 4]], [[5, 6, 7, 8]])
    other = samples_of([[1, 2], second_worker], [[5, 6], [7, 8]])
    (cause,) = batch_causes(one, other, 0)
    assert cause.name == "other batches"
    assert cause.evidence.endswith(words)


def growing(first: float, growth: float, num_steps: int = 6) -> RunRecord:
    """Steps that are apart from ones by a difference that grows."""
    return steps_with([1 + first * growth**step for step in range(num_steps)])


def test_a_difference_that_is_gone_without_rounding_is_no_cause():
    asked = []

    def rerun(factors, steps):
        asked.append(list(factors))
        return steps_with([1] * steps), steps_with([1] * steps)

    found = diagnose(steps_with([1] * 6), growing(1e-7, 10), rerun)
    assert asked == [["order of sums"]]
    assert found.is_same
    assert (found.divergence, found.causes, found.is_explained) == (None, [], True)
    rounding = found.rounding
    assert (rounding.vanishes_without, rounding.divergence.step) == ("order of sums", 4)
    assert rounding.at_first == pytest.approx(1e-7, rel=0.2)
    assert rounding.growth == pytest.approx(10, rel=0.1)
    assert rounding.unrelated_at in (7, 8)  # products estimate norms


def test_float64_is_asked_where_sums_cannot_be_exact():
    """In plain loops; also if the script fails with exact sums."""
    asked = []

    def rerun(factors, steps):
        asked.append(list(factors))
        if factors == ["order of sums"]:
            raise UsageError("on purpose")
        return steps_with([1] * steps), steps_with([1] * steps)

    one, other = steps_with([1] * 6), growing(1e-7, 10)
    assert diagnose(one, other, rerun).rounding.vanishes_without == "float32"
    assert asked == [["order of sums"], ["float32"]]
    asked.clear()
    other.first.is_in_steps = False
    assert diagnose(one, other, rerun).rounding.vanishes_without == "float32"
    assert asked == [["float32"]]


def test_a_mistake_behind_rounding_is_named():
    """Without rounding the runs agree up to the step at which a batch grows."""

    def rerun(factors, steps):
        assert factors == ["order of sums"]
        other = steps_with([1] * 5 + [1.2])
        larger = steps_with([1], samples=2).first.steps[0]
        other.first.steps[5] = replace(other.first.steps[5], samples=larger.samples)
        return steps_with([1] * 6), other

    found = diagnose(steps_with([1] * 6), growing(1e-7, 10), rerun)
    assert not found.is_same
    assert found.rounding.divergence.step == 4
    assert found.divergence.step == 5
    assert [cause.name for cause in found.causes] == ["global batch"]


def test_a_mistake_that_stays_without_rounding_is_not_excused():
    def rerun(factors, steps):
        return steps_with([1] * steps), growing(1e-7, 10, steps)

    found = diagnose(steps_with([1] * 6), growing(1e-7, 10), rerun)
    assert (found.is_same, found.rounding, found.is_explained) == (False, None, False)


def test_a_large_difference_of_the_first_step_is_not_looked_for_in_rounding():
    asked = []

    def rerun(factors, steps):
        asked.append(list(factors))
        return steps_with([1] * steps), steps_with([1.5] * steps)

    assert not diagnose(steps_with([1] * 3), steps_with([1.5] * 3), rerun).is_same
    assert asked == [["random state"]]
