"""What keeps workers from being as fast as they are many is told apart, and nothing is left."""

import math
from dataclasses import replace

import pytest

from allstep.plan.bottlenecks import bottlenecks, growing_bottleneck, largest_bottleneck
from allstep.plan.cluster import Cluster
from allstep.plan.nodes import Link
from allstep.plan.policies import PolicySpec
from allstep.plan.predict import predict_one
from allstep.plan.stragglers import NO_STRAGGLERS, Stragglers
from allstep.plan.time_to_target import Target
from allstep.plan.workload import TrainingSpec, Workload

DDP = PolicySpec(name="DDP", algorithm="ring", bucket_bytes=25 << 20)
FAST = 1e15


def predicted(
    num_workers, *, bandwidth_bps=FAST, slowdown=0.0, optimizer_s=0.0, spread=0.0, batch=None
):
    link = Link(bandwidth_bps=bandwidth_bps)
    cluster = Cluster(
        name="",
        num_nodes=64,
        workers_per_node=1,
        intra=link,
        inter=link,
        copy_bytes_per_s=1e15,
        compute_slowdown=slowdown,
    )
    micro = Workload.from_step(num_params=25_000_000, step_s=0.1, num_samples=32)
    job = TrainingSpec(micro=replace(micro, optimizer_s=optimizer_s), global_batch=batch)
    stragglers = Stragglers(spread=spread) if spread else NO_STRAGGLERS
    return predict_one(job, cluster, DDP, num_workers, stragglers)


CASES = {
    "the exchange": {"bandwidth_bps": 1e9},
    "the exchange takes": {"bandwidth_bps": 1e9, "slowdown": 3.0, "spread": 0.1},
    "a step has 4 micro-batches for 6 workers, which idle 33% of it": {"batch": 128},
    "together they compute 4.": {"batch": 32 * 6, "optimizer_s": 1.0},
    "they wait for slower ones in": {"spread": 1.0},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=str)
@pytest.mark.parametrize("noise_scale", [None, 1, 100, 1e9])
def test_the_product_of_all_factors_is_the_lost_speed(changes, noise_scale):
    found = predicted(6, **changes)
    target, speed_up = None, found.speed_up
    if noise_scale is not None:
        target = Target(critical_batch=noise_scale, known_batch=32)
        speed_up = target.speed_up(found)
    product = math.prod(loss.factor for loss in bottlenecks(found, target))
    assert product == pytest.approx(6 / speed_up)


@pytest.mark.parametrize(("reason", "changes"), CASES.items())
def test_each_cause_raises_its_own_factor_only(reason, changes):
    assert largest_bottleneck(predicted(6, **changes)).reason.startswith(reason)


def test_an_unlimited_link_has_no_bottleneck():
    for loss in bottlenecks(predicted(6), Target(critical_batch=1e12)):
        assert loss.factor == pytest.approx(1.0, abs=1e-5)


def test_a_batch_beyond_the_noise_scale_becomes_the_largest_bottleneck():
    slow = predicted(6, bandwidth_bps=10e9)
    factors = [loss.factor for loss in bottlenecks(slow)]
    for noise_scale in (1, 30, 100, 300, 1000, 10_000):
        target = Target(critical_batch=noise_scale)
        samples = target.samples(6 * 32) / target.samples(32)
        blamed = largest_bottleneck(slow, target)
        assert (f"at a noise scale of {noise_scale:,}" in blamed.reason) == (samples > max(factors))
        assert ("a larger batch would not" in blamed.cure) == (samples > max(factors))


def test_growing_bottleneck_grows_most_from_few_to_many_workers():
    """Not what was large before: a slow wire is as slow for four workers as for eight."""
    target = Target(critical_batch=200)
    few, many = (predicted(n, bandwidth_bps=1e9) for n in (8, 32))
    assert largest_bottleneck(few, target).reason.startswith("the exchange")
    assert growing_bottleneck(few, many, target).reason == (
        "a batch of 1,024 takes 5.3x the samples of one of 32 at a noise scale of 200"
    )
