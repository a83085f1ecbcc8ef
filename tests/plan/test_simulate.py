import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.exchange import attach, make_policy
from allstep.plan.activity import Activity
from allstep.plan.cluster import Cluster
from allstep.plan.cost import collective_s
from allstep.plan.nodes import Link
from allstep.plan.policies import PolicySpec
from allstep.plan.simulate import exchange_traffic, simulate
from allstep.plan.stragglers import Stragglers
from allstep.plan.workload import Workload
from tests.helpers.nodes import make_nodes
from tests.helpers.ranks import run_ranks

LINK = Link(bandwidth_bps=1e9, latency_s=1e-4)
MIB = 2**20


def hosts(num_nodes, **changes):
    return Cluster(
        name="hosts", num_nodes=num_nodes, workers_per_node=1, intra=LINK, inter=LINK, **changes
    )


WORKLOAD = Workload(
    num_params=5_000_000, forward_s=0.04, backward_s=0.08, optimizer_s=0.01, num_samples=32
)
AT_THE_END = PolicySpec(name="at the end", algorithm="ring", bucket_bytes=None)
OVERLAPPED = PolicySpec(name="overlapped", algorithm="ring", bucket_bytes=4 * MIB)


def wire_s(cluster, num_elements=WORKLOAD.num_params):
    return collective_s("fp32", "ring", cluster, num_elements)


@pytest.mark.parametrize("policy", [AT_THE_END, OVERLAPPED, replace(OVERLAPPED, staleness=2)])
def test_one_worker_only_computes(policy):
    report = simulate(WORKLOAD, hosts(1, compute_slowdown=1.0), policy)
    assert report.step_s == pytest.approx(WORKLOAD.compute_s)
    assert report.efficiency == pytest.approx(1.0)
    assert report.exposed_s == report.wire_s == report.traffic.sent_bytes == 0


@pytest.mark.parametrize("num_nodes", [2, 3, 8])
def test_without_overlap_everything_is_exposed(num_nodes):
    cluster = hosts(num_nodes)
    report = simulate(WORKLOAD, cluster, AT_THE_END)
    assert report.exposed_s == pytest.approx(wire_s(cluster))
    assert report.step_s == pytest.approx(WORKLOAD.compute_s + wire_s(cluster))


def test_overlapped_buckets_follow_one_another():
    """The recursion end = max(end before, ready) + seconds, by hand."""
    cluster = hosts(4)
    now, end = WORKLOAD.forward_s, 0.0
    for bucket in WORKLOAD.buckets(WORKLOAD.bucket_sizes(4 * MIB)):
        now += bucket.backward_s
        end = max(end, now) + wire_s(cluster, bucket.num_elements)
    report = simulate(WORKLOAD, cluster, OVERLAPPED)
    assert report.step_s == pytest.approx(end + WORKLOAD.optimizer_s)
    assert report.exposed_s == pytest.approx(end - now)
    assert report.step_s < simulate(WORKLOAD, cluster, AT_THE_END).step_s


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("bandwidth_bps", [1e8, 1e9, 1e10])
def test_stale_gradients_take_the_longer_of_compute_and_wire(staleness, bandwidth_bps):
    slow = replace(LINK, bandwidth_bps=bandwidth_bps)
    cluster = replace(hosts(2), intra=slow, inter=slow)
    report = simulate(WORKLOAD, cluster, replace(AT_THE_END, staleness=staleness))
    assert report.step_s == pytest.approx(max(WORKLOAD.compute_s, wire_s(cluster)))


def test_local_sgd_exchanges_once_in_sync_every_steps():
    cluster = hosts(4)
    report = simulate(WORKLOAD, cluster, replace(AT_THE_END, sync_every=5))
    assert report.step_s == pytest.approx(WORKLOAD.compute_s + wire_s(cluster) / 5)
    assert report.exposed_s == pytest.approx(wire_s(cluster) / 5)


@pytest.mark.parametrize("bandwidth_bps", [1e7, 1e8, 1e9, 1e10, 1e12])
@pytest.mark.parametrize("bucket_bytes", [MIB, 8 * MIB, None])
@pytest.mark.parametrize("num_nodes", [2, 5, 64])
def test_a_step_lies_between_its_bounds(bandwidth_bps, bucket_bytes, num_nodes):
    """Not shorter than compute or wire alone, not longer than both; less on a faster wire."""
    policy = replace(OVERLAPPED, bucket_bytes=bucket_bytes)

    def step(bps):
        link = Link(bandwidth_bps=bps, latency_s=1e-5)
        return simulate(WORKLOAD, replace(hosts(num_nodes), intra=link, inter=link), policy)

    found = step(bandwidth_bps)
    compute_s = WORKLOAD.compute_s
    assert max(compute_s, found.wire_s) <= found.step_s * (1 + 1e-9)
    assert found.step_s <= (compute_s + found.wire_s) * (1 + 1e-9)
    assert found.step_s == pytest.approx(compute_s + found.exposed_s)
    assert step(2 * bandwidth_bps).step_s <= found.step_s


def test_an_update_is_never_hidden_without_staleness():
    """A negative control: with an endless wire only staleness 0 shows it in full."""
    cluster = hosts(2)
    fresh = simulate(WORKLOAD, cluster, AT_THE_END).step_s
    stale = simulate(WORKLOAD, cluster, replace(AT_THE_END, staleness=1)).step_s
    assert fresh - stale == pytest.approx(min(WORKLOAD.compute_s, wire_s(cluster)))


@pytest.mark.parametrize(("staleness", "sync_every"), [(0, 1), (1, 1), (2, 1), (0, 3)])
def test_stragglers_follow_a_simulation_worker_by_worker(staleness, sync_every):
    """An oracle of plain loops over workers, buckets and steps."""
    cluster, stragglers = hosts(5), Stragglers(spread=0.3, slow_probability=0.1, slow_factor=3)
    policy = replace(OVERLAPPED, staleness=staleness, sync_every=sync_every)
    report = simulate(WORKLOAD, cluster, policy, stragglers)

    buckets = WORKLOAD.buckets(WORKLOAD.bucket_sizes(4 * MIB))
    seconds = [wire_s(cluster, bucket.num_elements) for bucket in buckets]
    clocks, ends, marks, drawn = [0.0] * 5, [], [], []
    free = (staleness + 1) * WORKLOAD.compute_s if staleness else 0.0  # it can't keep up
    assert sum(seconds) > WORKLOAD.compute_s
    num_warm, num_rounds = 2 * staleness + 1, 20
    for step in range((num_warm + num_rounds) * sync_every):
        factors = stragglers.draw(step + 1, 5)
        drawn += [factors.mean()]
        if sync_every > 1:
            clocks = [c + f * WORKLOAD.compute_s for c, f in zip(clocks, factors, strict=True)]
            if step % sync_every == sync_every - 1:
                clocks = [max(clocks) + sum(seconds)] * 5
        else:
            now = [c + f * WORKLOAD.forward_s for c, f in zip(clocks, factors, strict=True)]
            for bucket, duration in zip(buckets, seconds, strict=True):
                now = [n + f * bucket.backward_s for n, f in zip(now, factors, strict=True)]
                free = max(free, *now) + duration
            ends.append(free)
            awaited = ends[step - staleness] if step >= staleness else 0.0
            clocks = [
                max(n, awaited) + f * WORKLOAD.optimizer_s
                for n, f in zip(now, factors, strict=True)
            ]
        marks.append(max(clocks))
    first = marks[num_warm * sync_every - 1]
    num_steps = num_rounds * sync_every
    surplus_s = (sum(drawn[-num_steps:]) / num_steps - 1.2) * WORKLOAD.compute_s
    assert report.step_s == pytest.approx((marks[-1] - first) / num_steps - surplus_s)
    assert report.compute_s == pytest.approx(1.2 * WORKLOAD.compute_s)
    assert report.straggler_s > 0


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 1000.0])
@pytest.mark.parametrize("staleness", [0, 1])
def test_no_worker_beats_its_own_compute(staleness, spread):
    """However far off the draws of some steps are from their mean."""
    fast = Link(bandwidth_bps=4e11)
    cluster = replace(hosts(2), intra=fast, inter=fast)
    policy = replace(OVERLAPPED, staleness=staleness)
    for seed in range(20):
        report = simulate(WORKLOAD, cluster, policy, Stragglers(spread=spread, seed=seed))
        assert 0 < report.efficiency <= 1 + 1e-9
        assert 0 <= report.exchange_share < 0.2


def test_the_slowest_of_many_is_slower():
    stragglers = Stragglers(spread=0.05)
    few = simulate(WORKLOAD, hosts(2), AT_THE_END, stragglers)
    many = simulate(WORKLOAD, hosts(1000), AT_THE_END, stragglers)
    assert many.step_s - wire_s(hosts(1000)) > few.step_s - wire_s(hosts(2)) > WORKLOAD.compute_s


def test_a_single_worker_with_stragglers_takes_its_mean():
    report = simulate(WORKLOAD, hosts(1), AT_THE_END, Stragglers(spread=0.5))
    assert report.step_s == pytest.approx(WORKLOAD.compute_s)


def test_local_sgd_averages_stragglers_out():
    cluster = replace(hosts(64), inter=Link(bandwidth_bps=1e15))
    stragglers = Stragglers(spread=0.2)
    every_step = simulate(WORKLOAD, cluster, AT_THE_END, stragglers).step_s
    rarely = simulate(WORKLOAD, cluster, replace(AT_THE_END, sync_every=16), stragglers).step_s
    assert WORKLOAD.compute_s < rarely < every_step


def test_stragglers_depend_on_the_seed():
    reports = [
        simulate(WORKLOAD, hosts(4), AT_THE_END, Stragglers(spread=0.2, seed=seed)).step_s
        for seed in (0, 0, 1)
    ]
    assert reports[0] == reports[1] != reports[2]


def test_compute_slows_down_beside_communication():
    """All communication lies beside compute: progress is lost for as long as the wire is busy."""
    cluster = hosts(2, compute_slowdown=0.5)
    policy = replace(AT_THE_END, staleness=1)
    report = simulate(WORKLOAD, cluster, policy)
    busy = wire_s(hosts(2))
    compute = WORKLOAD.compute_s
    slowed = min(busy, 1.5 * compute)
    expected = max(busy, compute + slowed * (1 - 1 / 1.5))
    assert report.step_s == pytest.approx(expected)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("bandwidth_bps", [1e8, 1e9, 1.5e9, 1.7e9, 2e9, 1e10])
@pytest.mark.parametrize("bucket_bytes", [MIB, None])
def test_one_round_equals_the_long_run(staleness, bandwidth_bps, bucket_bytes):
    """Twenty rounds of workers that hardly differ come to the one that is measured of equals."""
    link = Link(bandwidth_bps=bandwidth_bps, latency_s=1e-4)
    slow = {"compute_slowdown": 0.3, "communication_slowdown": 0.2}
    cluster = replace(hosts(4, **slow), intra=link, inter=link)
    policy = replace(OVERLAPPED, bucket_bytes=bucket_bytes, staleness=staleness)
    one = simulate(WORKLOAD, cluster, policy).step_s
    many = simulate(WORKLOAD, cluster, policy, Stragglers(spread=1e-9)).step_s
    assert many == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("staleness", [1, 3, 8])
def test_old_collectives_do_not_delay_steps(staleness):
    fast = Link(bandwidth_bps=1e12)
    cluster = replace(hosts(4), intra=fast, inter=fast, compute_slowdown=0.5)
    report = simulate(WORKLOAD, cluster, replace(OVERLAPPED, staleness=staleness))
    assert report.exposed_s == 0
    assert report.step_s == pytest.approx(WORKLOAD.compute_s + report.wire_s * (1 - 1 / 1.5))


def test_communication_slows_down_beside_compute():
    fast = Link(bandwidth_bps=8e9, latency_s=1e-4)
    cluster = replace(hosts(2), intra=fast, inter=fast)
    slowed = replace(cluster, communication_slowdown=0.5)
    policy = replace(AT_THE_END, staleness=1)  # wholly beside compute
    plain_s = simulate(WORKLOAD, cluster, policy).wire_s
    assert simulate(WORKLOAD, slowed, policy).wire_s == pytest.approx(1.5 * plain_s)
    # Nothing is beside compute at the end of backward.
    assert simulate(WORKLOAD, slowed, AT_THE_END).wire_s == pytest.approx(plain_s)
    # The last bucket goes alone, the ones before it beside the backward pass.
    overlapped = simulate(WORKLOAD, slowed, OVERLAPPED).wire_s
    assert plain_s < overlapped < 1.5 * plain_s


def test_encoding_is_part_of_the_exchange():
    cheap = hosts(2, copy_bytes_per_s=1e15)
    dear = hosts(2, copy_bytes_per_s=1e9)
    policy = replace(AT_THE_END, compression="fp16")
    lost = simulate(WORKLOAD, dear, policy).step_s - simulate(WORKLOAD, cheap, policy).step_s
    encode_s = 12 * WORKLOAD.num_params / 2e9
    sum_s = 1.5 * WORKLOAD.num_params / 1e9  # half of the two-byte elements
    assert lost == pytest.approx(encode_s + sum_s, rel=1e-3)


def test_traffic_is_counted_bucket_by_bucket():
    report = simulate(WORKLOAD, hosts(4), OVERLAPPED)
    assert report.traffic == exchange_traffic(WORKLOAD, OVERLAPPED, make_nodes(4))
    num_buckets = len(WORKLOAD.bucket_sizes(4 * MIB))
    assert report.traffic.num_messages == 6 * num_buckets
    assert report.traffic.sent_bytes == pytest.approx(1.5 * WORKLOAD.gradient_bytes, rel=1e-5)


DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def trained(comm, dtype, every):
    """The exchange of a model that has made a step or two, and a workload of its size."""
    model = torch.nn.Linear(300, 200, bias=False, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = make_policy(sync_every=every if every > 1 else None, algorithm="ring")
    exchange = attach(model, comm, policy, optimizer=optimizer)
    for _ in range(every):
        model(torch.ones(2, 300, dtype=dtype)).sum().backward()
        optimizer.step()
    workload = replace(WORKLOAD, num_params=60_000, element_bytes=dtype.itemsize)
    return exchange, workload


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_travel_in_the_models_own_dtype(dtype):
    def sent(comm):
        exchange, workload = trained(comm, dtype, 1)
        traffic = exchange_traffic(workload, AT_THE_END, make_nodes(2), comm.rank)
        return exchange.stats().sent_bytes, traffic.sent_bytes

    for found, expected in run_ranks(2, sent):
        assert found == pytest.approx(expected, rel=0.01)  # and what workers compare


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_are_averaged_in_float32_or_more(dtype, monkeypatch):
    summed_bytes, all_reduce_for_real = [], Communicator.all_reduce

    def all_reduce(comm, tensor, *args, **options):
        summed_bytes.append(tensor.nbytes)
        return all_reduce_for_real(comm, tensor, *args, **options)

    monkeypatch.setattr(Communicator, "all_reduce", all_reduce)
    averaged = replace(AT_THE_END, sync_every=2)

    def expected(comm):
        exchange, workload = trained(comm, dtype, 2)
        exchange.averaging.flush()
        return exchange_traffic(workload, averaged, make_nodes(2), comm.rank).sent_bytes

    for sent_bytes in run_ranks(2, expected):
        assert max(summed_bytes) == sent_bytes  # a ring of two sends all of it


def test_timeline_has_one_step():
    spans = simulate(WORKLOAD, hosts(4), OVERLAPPED).timeline
    assert min(span.start_s for span in spans) == pytest.approx(0.0)
    num_buckets = len(WORKLOAD.bucket_sizes(4 * MIB))
    names = [span.name for span in spans if span.lane == "compute"]
    assert names == ["forward", *(f"backward {i}" for i in range(num_buckets)), "optimizer"]
    wire = [span for span in spans if span.lane == "wire"]
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(wire))
    assert [span.lane for span in spans].count("wait") == 1


def test_sixteen_thousand_workers_are_simulated():
    report = simulate(WORKLOAD, hosts(16384), OVERLAPPED, Stragglers(spread=0.05))
    assert report.step_s > WORKLOAD.compute_s


def test_simulate_refuses_an_open_policy():
    with pytest.raises(UsageError, match=r'`policy` \(open\) leaves "auto" open'):
        simulate(WORKLOAD, hosts(2), PolicySpec(name="open"))


def test_simulate_refuses_too_many_buckets():
    """At once, before a list of them is made."""
    policy = PolicySpec(name="tiny", algorithm="ring", bucket_bytes=4)
    many = replace(WORKLOAD, num_params=10**15)
    with pytest.raises(UsageError, match=r"1,000,000,000,000,000 buckets with tiny, whose"):
        simulate(many, hosts(2), policy)
    whole = replace(many, gradients=(10**15 - 1, 1))  # which are two buckets
    assert simulate(whole, hosts(2), policy).step_s > 0


def test_simulate_refuses_too_many_stragglers():
    policy = PolicySpec(name="p", algorithm="ring", bucket_bytes=None)
    with pytest.raises(UsageError, match=r"at most 1,048,576 `workers` \(=1,000,000,000\)"):
        simulate(WORKLOAD, hosts(10**9), policy, Stragglers(spread=0.1))
    assert simulate(WORKLOAD, hosts(10**9), policy).step_s > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compression": "fp17"}, r"`compression` \(='fp17'\).*did you mean `fp16`"),
        ({"algorithm": "rings"}, r"`algorithm` \(='rings'\).*did you mean `ring`"),
        ({"bucket_bytes": 0}, r"`bucket_bytes` \(=0\) must be at least 1"),
        ({"bucket_bytes": "big"}, r"`bucket_bytes` \(='big'\)"),
        ({"staleness": -1}, r"`staleness` \(=-1\) must be at least 0"),
        ({"sync_every": 0}, r"`sync_every` \(=0\) must be at least 1"),
        (
            {"sync_every": 2, "staleness": 1},
            r"`sync_every` \(=2\) and `staleness` \(=1\) exclude each other",
        ),
    ],
)
def test_policy_spec_refuses_wrong_numbers(changes, message):
    with pytest.raises(UsageError, match=message):
        PolicySpec(name="wrong", **changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"spread": -0.1}, "spread"),
        ({"slow_probability": 1.5}, "slow_probability"),
        ({"slow_factor": 0.5}, "slow_factor"),
    ],
)
def test_stragglers_refuse_wrong_numbers(changes, name):
    with pytest.raises(UsageError, match=f"`{name}`"):
        Stragglers(**changes)


def test_activity_forgets_old_intervals_without_a_change():
    kept, forgetful = Activity(), Activity()
    for wire in (kept, forgetful):
        for start in range(0, 20, 2):
            wire.occupy(float(start), start + 1.0, slowdown=1.0)
    forgetful.forget_before(kept.progress_at(10.5))
    assert forgetful.free_s == kept.free_s
    times = np.linspace(10.5, 25, 50)
    progress = np.array([kept.progress_at(time) for time in times])
    np.testing.assert_allclose([forgetful.progress_at(time) for time in times], progress)
    for wire in (kept, forgetful):
        np.testing.assert_allclose(wire.times_at(progress), times)
        np.testing.assert_allclose([wire.time_at(p) for p in progress], times)
    assert forgetful.progress_at(1.0) <= forgetful.progress_at(10.0)  # long past for everyone
    forgetful.forget_before(1000.0)
    assert forgetful.time_at(kept.progress_at(30.0)) == 30.0


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("bucketing_s_per_byte", [0.0, 4e-9])
def test_waiting_workers_do_not_slow_communication(staleness, bucketing_s_per_byte):
    """A step's compute lies beside the wire; the rest of the wire's time has the cores alone."""
    cluster = hosts(
        2,
        compute_slowdown=0.5,
        communication_slowdown=1.0,
        bucketing_s_per_byte=bucketing_s_per_byte,
    )
    slow = replace(LINK, bandwidth_bps=1e8)
    cluster = replace(cluster, intra=slow, inter=slow)
    report = simulate(WORKLOAD, cluster, replace(AT_THE_END, staleness=staleness))
    bucketing_s = 4 * WORKLOAD.num_params * bucketing_s_per_byte
    beside_s = 1.5 * (WORKLOAD.compute_s + bucketing_s)
    alone_s = wire_s(cluster) - beside_s / 2
    assert alone_s > 0
    assert report.step_s == pytest.approx(beside_s + alone_s)
