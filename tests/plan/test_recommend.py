from dataclasses import replace

import pytest

from allstep.plan.accuracy import AccuracyCost, AccuracyTable, measured_accuracy
from allstep.plan.cluster import Cluster, Link
from allstep.plan.policies import POLICIES, PolicySpec
from allstep.plan.predict import predict
from allstep.plan.recommend import recommend
from allstep.plan.time_to_target import Target
from allstep.plan.workload import TrainingSpec, Workload

NOTHING = AccuracyTable(None, 0, {})
MEASURED = AccuracyTable(
    "fashion",
    4,
    {
        "fp16": AccuracyCost(0.01, 0.1),
        "int8": AccuracyCost(0.1, 0.1),
        "fp16 + staleness 1": AccuracyCost(0.3, 0.1),
        "local SGD, H = 16": AccuracyCost(0.45, 0.2),
    },
)


def predictions(gbit_s, counts, num_params=25_000_000, global_batch=None):
    link = Link(bandwidth_bps=gbit_s * 1e9, latency_s=30e-6)
    cluster = Cluster(name="", num_nodes=512, workers_per_node=1, intra=link, inter=link)
    micro = Workload.from_step(num_params=num_params, step_s=0.11, num_samples=32)
    return predict(TrainingSpec(micro=micro, global_batch=global_batch), cluster, POLICIES, counts)


def of(found, policy, num_workers):
    (cell,) = (p for p in found if (p.policy.name, p.num_workers) == (policy, num_workers))
    return cell


def test_the_fastest_that_keeps_its_accuracy():
    found = recommend(predictions(1, [1, 2, 4]), MEASURED)
    assert found.choice.policy.name == "local SGD, H = 16"
    assert "It cost 0.45 +- 0.20 points of accuracy on fashion." in found.sentence
    strict = recommend(predictions(10, [1, 2, 4]), MEASURED, max_points_lost=0.2)
    assert strict.choice.policy.name in ("fp16", "int8")
    plain = recommend(predictions(10, [1, 2, 4]), MEASURED, max_points_lost=0.0)
    assert plain.choice.policy.name == "fp32"
    assert "accuracy" not in plain.sentence


def test_what_is_not_measured_is_said_to_be():
    found = recommend(predictions(10, [1, 2, 4]), NOTHING)
    assert found.choice.policy.name == "fp16 + staleness 1"
    assert "not measured" in found.sentence


def test_averaged_parameters_are_not_recommended_unmeasured():
    found = recommend(predictions(0.1, [1, 2, 4]), NOTHING)
    assert found.choice is None
    assert found.sentence.startswith("don't: ")
    assert "local SGD" not in found.sentence  # which doesn't pay either
    found = recommend(predictions(0.5, [1, 2, 4]), NOTHING)
    assert found.choice is None
    assert found.sentence.endswith(
        "On 4 workers local SGD, H = 16 would come to 1.7x, at a cost in accuracy that is not"
        " measured."
    )


def test_averaged_parameters_are_not_recommended_beyond_the_workers_they_were_measured_on():
    few = replace(MEASURED, num_workers=2)
    cells = predictions(1, [1, 2, 4, 8])
    found = recommend(cells, few)
    assert found.choice is of(cells, "local SGD, H = 16", 2)
    assert [p.policy.name for p in found.best] == ["local SGD, H = 16", "int8", "int8"]
    assert found.sentence == (
        "2 workers with local SGD, H = 16: 1.4x one worker, 69% efficient; the batch grows from 32"
        " to 64. With DDP the exchange takes 87% of a step; this is 5.33x as fast. It cost 0.45 +-"
        " 0.20 points of accuracy on fashion. More workers don't pay: 4 would be 1.1x one worker"
        " with int8, as the exchange takes 72% of a step. On 8 workers local SGD, H = 16 would"
        " come to 4.4x, at a cost in accuracy that is measured on 2 workers only."
    )
    assert recommend(cells, replace(few, num_workers=8)).choice.num_workers == 8
    # Others take the mean at every step, and may be recommended for any number of workers.
    assert recommend(predictions(10, [1, 32]), few).choice.policy.name == "fp16 + staleness 1"


def test_of_equals_the_simplest():
    found = recommend(predictions(400, [1, 2, 4], num_params=100_000), MEASURED)
    assert found.choice.policy.name == "DDP"
    assert found.choice.num_workers == 4
    assert found.sentence == (
        "4 workers with DDP: 4.0x one worker, 100% efficient; the batch grows from 32 to 128."
        " Nothing that may be recommended is more than 2% faster, so keep it simple."
    )


def test_more_workers_than_pay_are_not_recommended():
    """A fixed batch of four micro-batches has nothing for the fifth worker to do."""
    found = recommend(predictions(100, [1, 2, 4, 8, 16], global_batch=128), MEASURED)
    assert found.choice.num_workers == 4
    assert "batch grows" not in found.sentence
    assert found.sentence.endswith(
        " More workers don't pay: 8 would be 4.0x one worker with fp32, as a step has 4"
        " micro-batches for 8 workers, which idle 50% of it."
    )


def test_of_large_batches_the_noise_scale_is_asked_for():
    counts = [1, 64, 512]
    found = recommend(predictions(100, counts), MEASURED)
    assert found.choice.global_batch == 512 * 32
    assert "so large a batch still counts is not in these numbers: a noise scale" in found.sentence
    known = recommend(
        predictions(100, counts), MEASURED, target=Target(critical_batch=10**6, known_batch=32)
    )
    assert known.choice.num_workers == 512
    assert "is not in these numbers" not in known.sentence
    few = recommend(predictions(100, [1, 64, 256]), MEASURED)
    assert few.choice.global_batch == 256 * 32
    assert "is not in these numbers" not in few.sentence


def test_a_small_noise_scale_stops_it():
    counts = [1, 2, 4, 8, 16, 32, 64]
    free = recommend(predictions(100, counts), MEASURED)
    target = Target(critical_batch=100, known_batch=32)
    bound = recommend(predictions(100, counts), MEASURED, target=target)
    assert free.choice.num_workers == 64
    assert bound.choice.num_workers == 4
    assert bound.sentence == (
        "4 workers with fp32: 2.3x one worker on the way to the target, 4.0x in samples per"
        " second; the batch grows from 32 to 128. With DDP the exchange takes 4% of a step; this"
        " is 1.04x as fast. More workers don't pay: 8 would be 3.0x one worker with fp32, as a"
        " batch of 256 takes 2.7x the samples of one of 32 at a noise scale of 100."
    )
    tiny = Target(critical_batch=3, known_batch=32)
    never = recommend(predictions(100, counts), MEASURED, target=tiny)
    assert never.choice is None
    assert never.sentence == (
        "don't: 64 workers with fp32, the best that may be recommended, come to 1.08x the speed of"
        " one on the way to the target: a batch of 2,048 takes 58.6x the samples of one of 32 at a"
        " noise scale of 3. What would help: a faster machine; a larger batch would not."
    )


def test_a_batch_of_one_micro_batch_leaves_workers_idle():
    found = recommend(predictions(100, [1, 2, 4], global_batch=32), MEASURED)
    assert found.sentence == (
        "don't: 2 workers with fp32, the best that may be recommended, come to 1.00x the speed of"
        " one: a step has 1 micro-batch for 2 workers, which idle 50% of it. What would help: a"
        " larger batch, or smaller micro-batches."
    )


def test_a_slow_wire_is_named_though_samples_count():
    target = Target(critical_batch=5000, known_batch=32)
    found = recommend(predictions(1, [1, 2, 4, 8]), MEASURED, target=target, max_points_lost=0.05)
    assert found.sentence == (
        "don't: 8 workers with fp16, the best that may be recommended, come to 1.10x the speed of"
        " one on the way to the target: the exchange takes 86% of a step. What would help: a"
        " faster link, or more compute for each exchange. On 8 workers local SGD, H = 16 would"
        " come to 4.2x, at a cost in accuracy that is measured on 4 workers only."
    )


def test_only_what_may_be_recommended_is_the_best():
    cells = predictions(1, [1, 2, 4, 8])
    found = recommend(cells, MEASURED, max_points_lost=0.0)
    assert {p.policy.name for p in found.best} <= {"DDP", "fp32"}
    none = recommend([p for p in cells if p.policy.sync_every > 1], NOTHING)
    assert (none.choice, none.best) == (None, ())
    assert none.sentence == (
        "don't: none of these may be recommended. On 8 workers local SGD, H = 16 would come to"
        " 4.4x, at a cost in accuracy that is not measured."
    )


def test_one_worker():
    assert recommend(predictions(10, [1]), MEASURED).choice is None


def test_without_one_worker_in_the_table_it_is_still_compared_with_one():
    slow = recommend(predictions(0.01, [2, 4]), NOTHING)
    assert slow.choice is None
    fast = recommend(predictions(100, [2, 4]), NOTHING)
    assert fast.choice.num_workers == 4


@pytest.mark.parametrize(
    ("policy", "lossless"),
    [
        (PolicySpec(name="a"), True),
        (PolicySpec(name="a", compression="exact"), True),
        (PolicySpec(name="a", compression="fp16"), False),
        (PolicySpec(name="a", staleness=1), False),
        (PolicySpec(name="a", sync_every=4), False),
    ],
)
def test_only_full_precision_in_step_costs_nothing(policy, lossless):
    assert (NOTHING.describe(policy) == "none") is lossless
    assert (NOTHING.cost(policy) is None) is not lossless


def test_the_table_that_comes_along_fits_the_policies():
    table = measured_accuracy()
    assert set(table.points_lost) <= {policy.name for policy in POLICIES}
    assert (table.task is None) == (not table.points_lost)
    assert f"{table.num_workers} workers" in table.task
