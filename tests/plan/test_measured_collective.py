from dataclasses import replace

import pytest

from allstep.errors import UsageError
from allstep.plan.cluster import Cluster
from allstep.plan.measured_collective import MeasuredCollective
from allstep.plan.nodes import Link
from allstep.plan.policies import PolicySpec
from allstep.plan.predict import predict_one
from allstep.plan.simulate import simulate
from allstep.plan.workload import TrainingSpec, Workload

TIMED = MeasuredCollective(
    compression="fp32",
    algorithm="native",
    num_elements=(1000, 2000, 4000, 8000),
    seconds=(0.01, 0.02, 0.06, 0.14),
)
LINK = Link(bandwidth_bps=1e9, latency_s=1e-4)
CLUSTER = Cluster(
    name="two", num_nodes=2, workers_per_node=1, intra=LINK, inter=LINK, collectives=(TIMED,)
)
WORKLOAD = Workload(
    num_params=8000, forward_s=0.1, backward_s=0.2, optimizer_s=0.05, gradients=(1000, 3000, 4000)
)
AT_THE_END = PolicySpec(name="", algorithm="native", bucket_bytes=None)


@pytest.mark.parametrize(
    ("num_elements", "seconds"),
    [
        (1000, 0.01),
        (1500, 0.015),
        (3000, 0.04),
        (4000, 0.06),
        (8000, 0.14),
        (16000, 0.28),
        (0, 0.005),
    ],
)
def test_seconds_are_interpolated_between_and_beyond_the_sizes(num_elements, seconds):
    assert TIMED.seconds_of(num_elements) == pytest.approx(seconds)


def test_seconds_beyond_the_sizes_grow_as_between_the_last_two():
    flatter = replace(TIMED, seconds=(0.01, 0.02, 0.03, 0.05))
    assert flatter.seconds_of(16000) == pytest.approx(0.09)


def test_seconds_never_fall_with_size():
    noisy = replace(TIMED, seconds=(0.02, 0.01, 0.06, 0.14))
    found = [noisy.seconds_of(n) for n in range(0, 5000, 100)]
    assert found == sorted(found)
    assert noisy.seconds_of(1) <= noisy.seconds_of(TIMED.num_elements[1]) == 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compression": "fp33"}, "`compression` \\(='fp33'\\): did you mean `fp32`"),
        ({"algorithm": "rong"}, "`algorithm` \\(='rong'\\): did you mean `ring`"),
        ({"num_elements": (1,), "seconds": (1.0,)}, "must be two or more that increase"),
        ({"num_elements": (2, 1, 3)}, "must be two or more that increase"),
        ({"seconds": (1.0, 2.0)}, "`seconds` .* must be above 0, one for each size"),
        ({"seconds": (1.0, 0.0, 2.0, 3.0)}, "`seconds` .* must be above 0"),
        ({"compute_slowdown": -0.1}, "`compute_slowdown` \\(=-0.1\\) must be 0 or more"),
    ],
)
def test_measured_collective_refuses_wrong_timings(changes, message):
    with pytest.raises(UsageError, match=message):
        replace(TIMED, **changes)


def test_measured_seconds_replace_the_formula():
    report = simulate(WORKLOAD, CLUSTER, AT_THE_END)
    assert report.step_s == pytest.approx(0.35 + TIMED.seconds_of(8000))
    formula = simulate(WORKLOAD, replace(CLUSTER, collectives=()), AT_THE_END)
    assert formula.step_s < 0.36


@pytest.mark.parametrize(("element_bytes", "num_float32"), [(2, 4000), (4, 8000), (8, 16000)])
def test_measured_seconds_scale_with_the_bytes_of_the_dtype(element_bytes, num_float32):
    workload = replace(WORKLOAD, element_bytes=element_bytes)
    report = simulate(workload, CLUSTER, AT_THE_END)
    assert report.wire_s == pytest.approx(TIMED.seconds_of(num_float32))
    half = replace(CLUSTER, collectives=(replace(TIMED, compression="fp16"),))
    report = simulate(workload, half, replace(AT_THE_END, compression="fp16"))
    assert report.wire_s == pytest.approx(TIMED.seconds_of(8000))  # two bytes each, whatever


def test_measured_seconds_are_dropped_for_other_numbers_of_workers():
    four = replace(CLUSTER, num_nodes=4)
    assert four.of(4).collectives == (TIMED,)
    assert four.of(2).collectives == ()
    assert four.measured("fp16", "native") is None


def test_predict_tries_measured_algorithms_only():
    prediction = predict_one(TrainingSpec(micro=WORKLOAD), CLUSTER, PolicySpec(name="fp32"), 2)
    assert prediction.policy.algorithm == "native"


def test_buckets_hold_whole_gradients():
    assert WORKLOAD.bucket_sizes(4000) == [1000, 3000, 4000]
    assert WORKLOAD.bucket_sizes(10_000) == [4000, 4000]
    assert WORKLOAD.bucket_sizes(10_000, 4000) == [1000, 3000, 4000]
    assert WORKLOAD.bucket_sizes(20_000) == [8000]
    assert replace(WORKLOAD, gradients=()).bucket_sizes(10_000) == [2500, 2500, 2500, 500]
    with pytest.raises(UsageError, match=r"`gradients` .* 8000 together"):
        replace(WORKLOAD, gradients=(1000,))


def test_compute_without_cores_is_not_slowed():
    slow = replace(TIMED, compute_slowdown=1.0, communication_slowdown=1.0)
    cluster = replace(CLUSTER, collectives=(slow,))
    stale = replace(AT_THE_END, staleness=1)
    awake, asleep = (
        simulate(replace(WORKLOAD, core_share=share), cluster, stale).step_s for share in (1, 0)
    )
    assert asleep == pytest.approx(0.35)
    # The exchange takes twice its 0.14 s, in which half of the compute is done.
    assert awake == pytest.approx(0.35 + 0.14)
    with pytest.raises(UsageError, match="`core_share` \\(=2\\) must be 0 to 1"):
        replace(WORKLOAD, core_share=2)


def test_averaged_parameters_are_copied_to_and_from_shared_memory():
    """A sum of gradients there is measured without copies."""
    fields = {"num_nodes": 1, "workers_per_node": 2, "inter": None, "bucketing_s_per_byte": 1e-6}
    cluster = replace(CLUSTER, **fields)
    local = replace(AT_THE_END, sync_every=4)
    by_network = simulate(WORKLOAD, cluster, local)
    shared = replace(cluster, collectives=(replace(TIMED, algorithm="shared_memory"),))
    by_memory = simulate(WORKLOAD, shared, replace(local, algorithm="shared_memory"))
    copy_s = 1e-6 * 4 * WORKLOAD.num_params
    assert by_memory.wire_s == pytest.approx(by_network.wire_s)
    assert by_memory.step_s == pytest.approx(by_network.step_s + 2 * copy_s / 4)


def test_copies_to_buckets_and_back_are_compute():
    cluster = replace(CLUSTER, bucketing_s_per_byte=1e-6, gradient_s=1e-3)
    copy_s = 1e-6 * 4 * 8000
    for copies_back, num_copies in ((False, 1), (True, 2)):
        report = simulate(WORKLOAD, cluster, replace(AT_THE_END, copies_back=copies_back))
        assert report.step_s == pytest.approx(0.35 + 0.14 + num_copies * copy_s + 3e-3)
    local = simulate(WORKLOAD, cluster, replace(AT_THE_END, sync_every=4))
    assert local.step_s == pytest.approx(0.35 + (0.14 + 3 * copy_s) / 4)
    assert simulate(WORKLOAD, cluster.of(1), AT_THE_END).step_s == pytest.approx(0.35)


def test_copies_back_slow_the_buckets_that_are_still_on_the_wire():
    slowed = replace(TIMED, communication_slowdown=0.5)
    cluster = replace(CLUSTER, collectives=(slowed,), bucketing_s_per_byte=1e-7)
    at_once = replace(WORKLOAD, backward_s=0.0)  # all buckets wait for the wire
    views = replace(AT_THE_END, bucket_bytes=4000)
    copies = replace(views, copies_back=True)
    copy_s = [1e-7 * 4 * size for size in WORKLOAD.gradients]
    views_s, copies_s = (simulate(at_once, cluster, p).step_s for p in (views, copies))
    # The last copy delays the step; those before it slow the buckets beside them by a half.
    assert copies_s - views_s == pytest.approx(copy_s[2] + (copy_s[0] + copy_s[1]) * (1 - 1 / 1.5))


def test_an_idle_link_with_a_burst_saves_time_once():
    cluster = replace(CLUSTER, burst_s=0.005)
    report = simulate(WORKLOAD, cluster, AT_THE_END)
    assert report.step_s == pytest.approx(0.35 + 0.14 - 0.005)
    # Buckets that follow one another find it busy: only the first is ahead.
    apart = simulate(WORKLOAD, cluster, replace(AT_THE_END, bucket_bytes=4000, staleness=0))
    slow = replace(WORKLOAD, backward_s=0.0)
    together = simulate(slow, cluster, replace(AT_THE_END, bucket_bytes=4000))
    seconds = [TIMED.seconds_of(n) for n in (1000, 3000, 4000)]
    saved = min(0.005, seconds[0] - TIMED.latency_s)
    assert together.wire_s == pytest.approx(sum(seconds) - saved)
    assert apart.wire_s == pytest.approx(sum(seconds) - saved - 2 * 0.005)


@pytest.mark.parametrize("name", ["burst_s", "bucketing_s_per_byte", "gradient_s"])
def test_cluster_refuses_wrong_constants(name):
    with pytest.raises(UsageError, match=f"`{name}` \\(=-1\\) must be 0 or more"):
        replace(CLUSTER, **{name: -1})
