import itertools

import pytest

import allstep
from allstep.errors import UsageError
from allstep.plan.cluster import Cluster
from allstep.plan.nodes import Link
from allstep.plan.policies import DDP, POLICIES, PolicySpec
from allstep.plan.predict import predict, predict_one, worth_adding
from allstep.plan.simulate import simulate
from allstep.plan.time_to_target import Target
from allstep.plan.workload import TrainingSpec, Workload

MICRO = Workload.from_step(num_params=25_000_000, step_s=0.11, num_samples=32)
ETHERNET = Link(bandwidth_bps=9.4e9, latency_s=30e-6)
HOSTS = Cluster(name="h", num_nodes=16384, workers_per_node=1, intra=ETHERNET, inter=ETHERNET)
NODES = Cluster(
    name="n",
    num_nodes=64,
    workers_per_node=8,
    intra=Link(bandwidth_bps=1e12, latency_s=3e-6),
    inter=ETHERNET,
    copy_bytes_per_s=1e12,
)


def test_predict_has_every_policy_on_every_number_of_workers():
    found = predict(TrainingSpec(micro=MICRO), HOSTS, POLICIES, [1, 2, 4])
    assert len(found) == len(POLICIES) * 3
    for prediction in found:
        assert prediction.global_batch == 32 * prediction.num_workers
        assert 0 < prediction.efficiency <= 1 + 1e-9
        if prediction.num_workers == 1:
            assert prediction.speed_up == pytest.approx(1.0)


def test_predict_chooses_the_fastest_algorithm_and_bucket_size():
    open_policy = PolicySpec(name="open")
    best = predict_one(TrainingSpec(micro=MICRO), NODES, open_policy, 64)
    for algorithm in ("ring", "halving_doubling", "hierarchical", "two_dimensional"):
        for bucket_bytes in (1 << 20, 16 << 20, None):
            settled = open_policy.with_choice(algorithm, bucket_bytes)
            assert best.report.step_s <= simulate(MICRO, NODES.of(64), settled).step_s


def test_predict_sends_gradients_of_many_gigabytes_during_the_backward_pass():
    """Their buckets are larger than those of smaller models, but not one for all."""
    micro = Workload.from_step(num_params=70_000_000_000, step_s=900.0)
    found = predict_one(TrainingSpec(micro=micro), HOSTS, PolicySpec(name="fp32"), 16)
    late = PolicySpec(name="late", bucket_bytes=None)
    at_the_end = predict_one(TrainingSpec(micro=micro), HOSTS, late, 16)
    assert found.efficiency > 1.3 * at_the_end.efficiency


def test_predict_keeps_a_given_algorithm_and_bucket_size():
    policy = PolicySpec(name="p", algorithm="halving_doubling", bucket_bytes=1000_000)
    assert predict_one(TrainingSpec(micro=MICRO), HOSTS, policy, 8).policy == policy
    partly = PolicySpec(name="p", algorithm="halving_doubling")
    assert (
        predict_one(TrainingSpec(micro=MICRO), HOSTS, partly, 8).policy.algorithm
        == "halving_doubling"
    )


def test_predict_takes_no_ring_for_thousands_of_hosts():
    small = TrainingSpec(micro=Workload.from_step(num_params=100_000, step_s=0.11, num_samples=32))
    assert (
        predict_one(small, HOSTS, PolicySpec(name="p"), 4096).policy.algorithm == "halving_doubling"
    )


def test_predict_lets_workers_of_a_node_share_its_link():
    """Halving and doubling from all eight workers at once loses to one ring through the node."""
    ring, halving = (
        predict_one(
            TrainingSpec(micro=MICRO), NODES, PolicySpec(name=a, algorithm=a, bucket_bytes=None), 64
        ).report.step_s
        for a in ("ring", "halving_doubling")
    )
    assert halving > 3 * ring


def test_predict_tries_shared_memory_where_there_is_some():
    node = Cluster(
        name="cpu",
        num_nodes=1,
        workers_per_node=4,
        intra=Link(bandwidth_bps=8e9, latency_s=1e-4),
        has_shared_memory=True,
    )
    assert predict_one(
        TrainingSpec(micro=MICRO), node, PolicySpec(name="p"), 4
    ).policy.algorithm == ("shared_memory")


def test_predict_scales_a_fixed_batch_worse_than_a_growing_one():
    growing = predict_one(TrainingSpec(micro=MICRO), HOSTS, DDP, 8)
    fixed = predict_one(TrainingSpec(micro=MICRO, global_batch=256), HOSTS, DDP, 8)
    assert growing.report.step_s == pytest.approx(fixed.report.step_s)  # one micro-batch each
    few = predict_one(TrainingSpec(micro=MICRO, global_batch=256), HOSTS, DDP, 2)
    assert few.efficiency > fixed.efficiency


def test_predict_refuses_more_workers_than_there_are():
    with pytest.raises(UsageError, match=r"exceeds the 512 of cluster n"):
        predict(TrainingSpec(micro=MICRO), NODES, POLICIES, [1024])


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([(1, 10.0)], 1),
        ([(1, 10.0), (2, 20.0), (4, 40.0)], 4),
        ([(1, 10.0), (2, 9.0), (4, 12.0)], 1),
        ([(1, 10.0), (2, 12.5), (4, 17.4)], 2),
        ([(1, 10.0), (2, 12.4), (4, 14.0)], 1),
        ([(2, 20.0), (4, 38.0), (8, 40.0)], 4),
        ([(1, 10.0), (2, 11.0), (4, 39.0)], 4),  # a bad step on the way to a good one
    ],
)
def test_worth_adding_needs_a_quarter_of_a_worker_each(rates, expected):
    assert worth_adding(rates) == expected


@pytest.mark.parametrize("batch", [1, 10, 1000, 1e6])
def test_target_steps_and_samples_lie_on_the_hyperbola(batch):
    target = Target(critical_batch=500, num_samples=1e6, known_batch=64)
    steps, samples = target.steps(batch), target.samples(batch)
    product = (steps / target.min_steps - 1) * (samples / target.min_samples - 1)
    assert product == pytest.approx(1.0)
    assert target.samples(64) == pytest.approx(1e6)


def test_target_seconds_stop_falling_beyond_the_critical_batch():
    target = Target(critical_batch=256, num_samples=1e6, known_batch=32)
    found = predict(TrainingSpec(micro=MICRO), HOSTS, [POLICIES[4]], [1, 8, 64, 512])
    seconds = [target.seconds(prediction) for prediction in found]
    assert seconds[0] == pytest.approx(1e6 / 32 * 0.11)
    gains = [early / late for early, late in itertools.pairwise(seconds)]
    assert gains[0] > 4 > gains[1] > 1.5 > gains[2]


@pytest.mark.parametrize("name", ["critical_batch", "num_samples", "known_batch"])
def test_target_refuses_wrong_numbers(name):
    values = {"critical_batch": 100.0, "num_samples": 1000.0, "known_batch": 10.0, name: 0.0}
    with pytest.raises(UsageError, match=rf"`{name}` \(=0.0\) must be above 0"):
        Target(**values)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_policy_in_code_makes_the_same_exchange_policy(policy):
    """In code it is a policy of the exchange with the same options."""
    code = policy.in_code.split("or ")[-1]
    found = eval(code, {"allstep": allstep})
    expected = (policy.compression, policy.staleness, policy.sync_every)
    every = found.sync_every if isinstance(found, allstep.LocalSGD) else 1
    assert (found.compression, found.staleness, every) == expected
