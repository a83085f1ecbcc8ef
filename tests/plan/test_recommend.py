import pytest

from allstep.plan.accuracy import AccuracyCost, AccuracyTable, measured_accuracy
from allstep.plan.cluster import Cluster, Link
from allstep.plan.job import Job
from allstep.plan.policy import POLICIES, Policy
from allstep.plan.recommend import recommend
from allstep.plan.scaling import predict
from allstep.plan.time_to_target import Target
from allstep.plan.workload import Workload

NOTHING = AccuracyTable(None, {})
MEASURED = AccuracyTable(
    "fashion",
    {
        "fp16": AccuracyCost(0.01, 0.1),
        "int8": AccuracyCost(0.1, 0.1),
        "fp16 + staleness 1": AccuracyCost(0.3, 0.1),
        "local SGD, H = 16": AccuracyCost(0.45, 0.2),
    },
)


def predictions(gbit_s, counts, num_params=25_000_000, global_batch=None):
    link = Link(bandwidth_bps=gbit_s * 1e9, latency_s=30e-6)
    cluster = Cluster(name="", num_nodes=64, workers_per_node=1, intra=link, inter=link)
    micro = Workload.from_step(num_params=num_params, step_s=0.11, num_samples=32)
    return predict(Job(micro=micro, global_batch=global_batch), cluster, POLICIES, counts)


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
        "local SGD, H = 16 would come to 1.7x, at a cost in accuracy that is not measured."
    )


def test_of_equals_the_simplest():
    found = recommend(predictions(400, [1, 2, 4], num_params=100_000), MEASURED)
    assert found.choice.policy.name == "DDP"
    assert found.choice.num_workers == 4
    assert "keep it simple" in found.sentence


def test_more_workers_than_pay_are_not_recommended():
    """A fixed batch of four micro-batches has nothing for the fifth worker to do."""
    found = recommend(predictions(100, [1, 2, 4, 8, 16], global_batch=128), MEASURED)
    assert found.choice.num_workers == 4
    assert "More workers don't pay: 8 would be" in found.sentence


def test_a_small_noise_scale_stops_it():
    counts = [1, 2, 4, 8, 16, 32, 64]
    free = recommend(predictions(100, counts), MEASURED)
    bound = recommend(
        predictions(100, counts), MEASURED, target=Target(critical_batch=100, known_batch=32)
    )
    assert free.choice.num_workers == 64
    assert bound.choice.num_workers < 16
    assert "the samples" in bound.sentence
    tiny = Target(critical_batch=3, known_batch=32)
    never = recommend(predictions(100, counts), MEASURED, target=tiny)
    assert never.choice is None
    assert "the time to the target of one" in never.sentence


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
        (Policy(name="a"), True),
        (Policy(name="a", wire="exact"), True),
        (Policy(name="a", wire="fp16"), False),
        (Policy(name="a", staleness=1), False),
        (Policy(name="a", every=4), False),
    ],
)
def test_only_full_precision_in_step_costs_nothing(policy, lossless):
    assert (NOTHING.describe(policy) == "none") is lossless
    assert (NOTHING.cost(policy) is None) is not lossless


def test_the_table_that_comes_along_fits_the_policies():
    table = measured_accuracy()
    assert set(table.points_lost) <= {policy.name for policy in POLICIES}
    assert (table.task is None) == (not table.points_lost)
