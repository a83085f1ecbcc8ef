from dataclasses import replace

import pytest

from allstep.errors import UsageError
from allstep.plan.accuracy import AccuracyCost, AccuracyTable, is_lossless, measured_accuracy
from allstep.plan.cluster import Cluster
from allstep.plan.describe import seconds_text
from allstep.plan.nodes import Link
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


def predictions(gbit_s, counts, num_params=25_000_000, step_s=0.11, **length):
    link = Link(bandwidth_bps=gbit_s * 1e9, latency_s=30e-6)
    cluster = Cluster(name="", num_nodes=512, workers_per_node=1, intra=link, inter=link)
    micro = Workload.from_step(num_params=num_params, step_s=step_s, num_samples=32)
    return predict(TrainingSpec(micro=micro, **length), cluster, POLICIES, counts)


def of(found, policy, num_workers):
    (cell,) = (p for p in found if (p.policy.name, p.num_workers) == (policy, num_workers))
    return cell


@pytest.mark.parametrize("gbit_s", [0.01, 1, 10, 100])
@pytest.mark.parametrize("table", [NOTHING, MEASURED], ids=["unmeasured", "measured"])
def test_the_choice_is_lossless_and_synchronous(gbit_s, table):
    found = recommend(predictions(gbit_s, [1, 2, 4, 8]), table)
    for p in (found.choice, *found.best):
        assert p is None or is_lossless(p.policy)
    assert found.lossy is None or not is_lossless(found.lossy.policy)


def test_the_choice_comes_first_and_the_lossy_policy_apart():
    found = recommend(predictions(10, [1, 2, 4]), MEASURED)
    assert (found.choice.policy.name, found.choice.num_workers) == ("fp32", 4)
    assert found.sentence == (
        "4 workers with fp32: 2.5x one worker, 63% efficient; the batch grows from 32 to 128."
        " The exchange costs no accuracy. With DDP the exchange takes 41% of a step; this is"
        " 1.08x as fast."
    )
    assert (found.lossy.policy.name, found.lossy.num_workers) == ("fp16 + staleness 1", 4)
    assert found.lossy_sentence == (
        "4 workers with fp16 + staleness 1 would be 4.0x one worker, 1.58x the above. It lost"
        " 0.30 +- 0.10 points of accuracy on fashion."
    )


def test_max_points_lost_limits_the_lossy_policy():
    cells = predictions(10, [1, 2, 4])
    assert recommend(cells, MEASURED, max_points_lost=0.2).lossy.policy.name in ("fp16", "int8")
    none = recommend(cells, MEASURED, max_points_lost=0.0)
    assert none.lossy is None
    assert none.choice.policy.name == "fp32"
    with pytest.raises(UsageError, match=r"`max_points_lost` \(=-1\) must be 0 or more"):
        recommend(cells, MEASURED, max_points_lost=-1)


def test_a_lossy_policy_without_a_measurement_is_said_to_be_unmeasured():
    found = recommend(predictions(10, [1, 2, 4]), NOTHING)
    assert found.lossy.policy.name == "fp16 + staleness 1"
    assert "not measured" in found.lossy_sentence
    assert "not measured" not in found.sentence


def test_a_lossy_policy_that_gains_little_is_not_proposed():
    cells = predictions(400, [1, 2, 4], num_params=100_000)
    found = recommend(cells, MEASURED)
    assert (found.lossy, found.lossy_sentence) == (None, "")
    slower = recommend(predictions(2, [1, 2, 4]), MEASURED)  # where the same policy gains
    assert slower.lossy is not None


def test_unmeasured_local_sgd_is_not_proposed_but_told():
    found = recommend(predictions(0.1, [1, 2, 4]), NOTHING)
    assert (found.choice, found.lossy) == (None, None)
    assert found.sentence.startswith("stay on one worker: ")
    assert "local SGD" not in found.lossy_sentence  # which doesn't pay either
    found = recommend(predictions(0.5, [1, 2, 4]), NOTHING)
    assert (found.choice, found.lossy) == (None, None)
    assert found.lossy_sentence == (
        "On 4 workers local SGD, H = 16 would come to 1.7x, at a cost in accuracy that is not"
        " measured."
    )


def test_local_sgd_is_not_proposed_for_more_workers_than_it_was_measured_on():
    few = replace(MEASURED, num_workers=2)
    cells = predictions(1, [1, 2, 4, 8])
    found = recommend(cells, few)
    assert found.lossy is of(cells, "local SGD, H = 16", 2)
    assert found.lossy_sentence == (
        "2 workers with local SGD, H = 16 would be 1.4x one worker. It lost 0.45 +- 0.20 points"
        " of accuracy on fashion. On 8 workers local SGD, H = 16 would come to 4.4x, at a cost"
        " in accuracy that is measured on 2 workers only."
    )
    assert recommend(cells, replace(few, num_workers=8)).lossy.num_workers == 8
    # Others take the mean at every step, and may be proposed for any number of workers.
    assert recommend(predictions(10, [1, 32]), few).lossy.policy.name == "fp16 + staleness 1"


def test_of_policies_equally_fast_the_simplest_is_chosen():
    found = recommend(predictions(400, [1, 2, 4], num_params=100_000), MEASURED)
    assert found.choice.policy.name == "DDP"
    assert found.choice.num_workers == 4
    assert found.sentence == (
        "4 workers with DDP: 4.0x one worker, 100% efficient; the batch grows from 32 to 128."
        " The exchange costs no accuracy. No lossless policy is more than 2% faster, so keep it"
        " simple."
    )


def test_workers_without_micro_batches_are_not_recommended():
    """A fixed batch of four micro-batches has nothing for the fifth worker to do."""
    found = recommend(predictions(100, [1, 2, 4, 8, 16], global_batch=128), MEASURED)
    assert found.choice.num_workers == 4
    assert "batch grows" not in found.sentence
    assert found.sentence.endswith(
        " More workers don't pay: 8 would be 4.0x one worker with fp32, as a step has 4"
        " micro-batches for 8 workers, which idle 50% of it."
    )


@pytest.mark.parametrize(
    ("total_samples", "is_worth_it"), [(96 * 32, False), (60_000, False), (200_000, True)]
)
def test_a_training_shorter_than_the_start_of_workers_stays_on_one(total_samples, is_worth_it):
    """Steps of 5 ms: 60,000 samples are 9.4 s on one worker, 200,000 are 31 s."""
    cells = predictions(100, [1, 2, 4, 8], 100_000, 0.005, total_samples=total_samples)
    found = recommend(cells, MEASURED)
    assert (found.choice is not None) is is_worth_it
    assert found.lossy is None
    assert recommend(cells, MEASURED, startup_s=0.0).choice.num_workers == 8


def test_a_training_that_is_too_short_says_its_seconds_and_those_of_the_start():
    cells = predictions(100, [1, 2, 4, 8], 100_000, 0.005, total_samples=96 * 32)
    assert recommend(cells, MEASURED).sentence == (
        "stay on one worker: it takes 480 ms for the whole training. 8 workers with fp32 would"
        " save 417 ms, but take about 10 s to start."
    )


def test_the_whole_training_is_told_in_seconds():
    cells = predictions(10, [1, 2, 4], total_samples=90 * 1_281_167)
    found = recommend(cells, MEASURED)
    one_s = 90 * 1_281_167 / 32 * 0.11
    assert found.choice.single_worker_training_s == pytest.approx(one_s)
    assert found.choice.training_s == pytest.approx(one_s / found.choice.speed_up)
    assert (
        f"The whole training takes {seconds_text(found.choice.training_s)} instead of"
        f" {seconds_text(one_s)} on one worker."
    ) in found.sentence
    assert f"{seconds_text(found.lossy.training_s)} for the whole training" in found.lossy_sentence
    assert "whole training" not in recommend(predictions(10, [1, 2, 4]), MEASURED).sentence


def test_with_a_noise_scale_the_whole_training_has_the_samples_of_a_larger_batch():
    cells = predictions(100, [1, 2], total_samples=3_200_000)
    target = Target(critical_batch=64, known_batch=32)  # 64 samples instead of 32: 4/3 as many
    one_s, choice = 100_000 * 0.11, of(cells, "fp32", 2)
    expected_s = one_s / choice.speed_up * (1 + 64 / 64) / (1 + 32 / 64)
    found = recommend(cells, MEASURED, target=target)
    assert found.choice.num_workers == 2
    assert f"training takes {seconds_text(expected_s)} instead of {seconds_text(one_s)}" in (
        found.sentence
    )


def test_without_a_noise_scale_a_large_batch_gets_a_note():
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


def test_a_small_noise_scale_limits_the_workers():
    counts = [1, 2, 4, 8, 16, 32, 64]
    free = recommend(predictions(100, counts), MEASURED)
    target = Target(critical_batch=100, known_batch=32)
    bound = recommend(predictions(100, counts), MEASURED, target=target)
    assert free.choice.num_workers == 64
    assert bound.choice.num_workers == 4
    assert bound.sentence == (
        "4 workers with fp32: 2.3x one worker on the way to the target, 4.0x in samples per"
        " second; the batch grows from 32 to 128. The exchange costs no accuracy. With DDP the"
        " exchange takes 4% of a step; this is 1.04x as fast. More workers don't pay: 8 would be"
        " 3.0x one worker with fp32, as a batch of 256 takes 2.7x the samples of one of 32 at a"
        " noise scale of 100."
    )
    tiny = Target(critical_batch=3, known_batch=32)
    never = recommend(predictions(100, counts), MEASURED, target=tiny)
    assert never.choice is None
    assert never.sentence == (
        "stay on one worker: 64 workers with fp32, the best that costs no accuracy, come to 1.08x"
        " the speed of one on the way to the target: a batch of 2,048 takes 58.6x the samples of"
        " one of 32 at a noise scale of 3. What would help: a faster machine; a larger batch would"
        " not."
    )


def test_a_batch_of_one_micro_batch_stays_on_one_worker():
    found = recommend(predictions(100, [1, 2, 4], global_batch=32), MEASURED)
    assert found.sentence == (
        "stay on one worker: 2 workers with fp32, the best that costs no accuracy, come to 1.00x"
        " the speed of one: a step has 1 micro-batch for 2 workers, which idle 50% of it. What"
        " would help: a larger batch, or smaller micro-batches."
    )


def test_a_slow_link_is_the_reason_though_a_target_is_given():
    target = Target(critical_batch=5000, known_batch=32)
    found = recommend(predictions(1, [1, 2, 4, 8]), MEASURED, target=target, max_points_lost=0.05)
    assert found.sentence == (
        "stay on one worker: 8 workers with DDP, the best that costs no accuracy, come to 0.58x"
        " the speed of one on the way to the target: the exchange takes 92% of a step. What"
        " would help: a faster link, or more compute for each exchange."
    )
    assert found.lossy_sentence == (
        "On 8 workers local SGD, H = 16 would come to 4.2x, at a cost in accuracy that is"
        " measured on 4 workers only."
    )


def test_policies_that_are_all_lossy_leave_one_worker():
    cells = [p for p in predictions(1, [1, 2, 4, 8]) if p.policy.sync_every > 1]
    found = recommend(cells, NOTHING)
    assert (found.choice, found.best, found.lossy) == (None, (), None)
    assert found.sentence == "stay on one worker: all of these policies may cost accuracy."
    assert found.lossy_sentence == (
        "On 8 workers local SGD, H = 16 would come to 4.4x, at a cost in accuracy that is not"
        " measured."
    )


def test_one_worker_has_no_choice():
    assert recommend(predictions(10, [1]), MEASURED).choice is None


def test_predictions_without_one_worker_are_compared_with_one_all_the_same():
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
def test_only_lossless_synchronous_policies_cost_nothing(policy, lossless):
    assert (NOTHING.describe(policy) == "none") is lossless
    assert (NOTHING.cost(policy) is None) is not lossless


def test_the_shipped_accuracy_table_names_known_policies():
    table = measured_accuracy()
    assert set(table.points_lost) <= {policy.name for policy in POLICIES}
    assert (table.task is None) == (not table.points_lost)
    assert f"{table.num_workers} workers" in table.task
