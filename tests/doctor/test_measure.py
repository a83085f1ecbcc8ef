import itertools
import json
from dataclasses import replace

import pytest

from allstep.comm import Communicator
from allstep.comm.algorithms import Native
from allstep.doctor import collectives, contention, gemm, links, measure, memory
from allstep.doctor.links import slowest
from allstep.doctor.measurements import PairTiming, read_measurements
from allstep.errors import CommunicationError, UsageError
from allstep.exchange.runner import ThreadRunner
from allstep.exchange.transport import Transport
from allstep.plan import POLICIES, Link, TrainingSpec, Workload, predict
from tests.helpers.ranks import run_ranks


@pytest.fixture(scope="module", autouse=True)
def in_a_hurry():
    """Small sizes and few repeats: what is tested is what is said, not how fast it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_SIZES_BYTES", (1 << 12, 1 << 14, 1 << 16))
        patch.setattr(collectives, "_BATCH_S", 0.001)
        patch.setattr(contention, "_ALONE_S", 0.01)
        patch.setattr(collectives, "_PAUSE_S", 0.001)
        patch.setattr(links, "_SIZES_BYTES", (1 << 10, 1 << 14, 1 << 16))
        patch.setattr(memory, "_COPY_BYTES", 1 << 16)
        patch.setattr(memory, "_COPY_S", 0.001)
        patch.setattr(measure, "_NUM_STEPS", 3)
        patch.setattr(gemm, "_CPU_SIZE", 64)
        yield


@pytest.fixture(scope="module")
def kept(in_a_hurry):
    """One measurement of four ranks on two hosts, for several tests."""
    return run_ranks(4, measure.measure, local_size=2)


def test_all_workers_know_the_same(kept):
    first, *others = kept
    assert all(other == first for other in others)


def test_it_has_everything_that_the_planner_needs(kept):
    found = kept[0]
    assert (found.num_nodes, found.workers_per_node, found.device) == (2, 2, "cpu")
    assert found.gemm_flops > 0 and found.copy_bytes_per_s > 0 and found.gradient_s >= 0
    assert [(c.compression, c.algorithm) for c in found.collectives] == [
        ("fp32", "native"),
        ("fp16", "native"),
        ("int8", "native"),
    ]
    predictions = predict(
        TrainingSpec(micro=Workload.from_step(num_params=10_000, step_s=0.1)),
        found.cluster("here"),
        POLICIES,
        [2, 4],
    )
    assert all(p.report.step_s > 0.05 for p in predictions)


def test_every_pair_of_hosts_is_timed_and_every_neighbour(kept):
    pairs = kept[0].pairs
    assert [(pair.ranks, pair.same_host) for pair in pairs] == [
        ((0, 1), True),
        ((0, 2), False),
        ((2, 3), True),
    ]
    assert kept[0].inter == next(pair.link for pair in pairs if not pair.same_host)


def test_the_slowest_pair_sets_the_pace():
    pairs = [
        PairTiming(ranks=(0, 1), same_host=True, link=Link(bandwidth_bps=9e9, latency_s=1e-6)),
        PairTiming(ranks=(0, 2), same_host=True, link=Link(bandwidth_bps=5e9, latency_s=1e-7)),
    ]
    assert slowest(pairs, same_host=True) == Link(bandwidth_bps=5e9, latency_s=1e-6)
    assert slowest(pairs, same_host=False) is None


def test_a_file_gives_back_the_same(kept, tmp_path):
    path = tmp_path / "here.json"
    kept[0].write(path)
    assert read_measurements(path) == kept[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["here.json"]


def test_files_that_do_not_work(kept, tmp_path):
    with pytest.raises(UsageError, match=r"`path` \(=.*no/such.json\) can't be written"):
        kept[0].write(tmp_path / "no" / "such.json")
    with pytest.raises(UsageError, match=r"`path` \(=.*none.json\) can't be read"):
        read_measurements(tmp_path / "none.json")
    path = tmp_path / "here.json"
    for text in ("{", "[]", "{}", '{"intra": {"bandwidth_bps": 0}, "inter": null}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"`path` \(=.*\) holds no measurements"):
            read_measurements(path)
    kept[0].write(path)
    table = json.loads(path.read_text())
    table["inter"]["bandwidth_bps"] = 0
    path.write_text(json.dumps(table))
    with pytest.raises(UsageError, match="`bandwidth_bps` \\(=0\\) must be above 0"):
        read_measurements(path)


def test_a_lone_worker_has_only_itself():
    found = measure.measure(Communicator.single_process())
    assert found.pairs == found.collectives == ()
    assert found.intra is found.inter is None
    assert found.cluster().num_workers == 1


def test_workers_of_one_host_share_memory():
    found = run_ranks(2, lambda comm: measure.measure(comm, ("fp32", "fp16")))[0]
    assert [(c.compression, c.algorithm) for c in found.collectives] == [
        ("fp32", "native"),
        ("fp32", "shared_memory"),
        ("fp16", "shared_memory"),
    ]
    assert found.burst_s == 0.0
    assert found.cluster().has_shared_memory


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "int8"])
def test_a_probe_exchanges_what_a_step_would(wire):
    """Means of equal buckets stay what they are; the backend only adds up, two at a time."""

    def probe(comm):
        transport = Transport(comm, Native(comm))
        bucket = collectives.BucketExchange(transport, wire, 4096)
        for flat, _ in bucket._buckets:
            flat.fill_(1.0)
        for _ in range(3):
            bucket.run()
        values = [flat[: bucket.num_elements].unique().tolist() for flat, _ in bucket._buckets]
        return bucket.num_elements, bucket.num_at_once, values

    at_once, value = (2, 2.0) if wire == "fp32" else (1, 1.0)
    num_used = 3 * at_once
    expected = (1024, at_once, [[1.0]] * (8 - num_used) + [[value]] * num_used)
    assert run_ranks(2, probe) == [expected] * 2


@pytest.mark.parametrize(("algorithm", "num_groups"), [("native", 2), ("shared_memory", 1)])
def test_each_size_has_connections_of_its_own(monkeypatch, algorithm, num_groups):
    """Where memory is shared there are none."""
    used = []

    class Watched(collectives.BucketExchange):
        def __init__(self, transport, *rest):
            used.append((transport.rank, transport.comm))
            super().__init__(transport, *rest)

    monkeypatch.setattr(collectives, "BucketExchange", Watched)
    kinds, sizes = [("fp32", algorithm)], (1 << 12, 1 << 13)

    def measure_all(comm):
        collectives.measure_collectives(comm, kinds, sizes_bytes=sizes, num_rounds=1)
        return comm

    comms = run_ranks(2, measure_all)
    assert len(used) == 4
    for rank, comm in enumerate(comms):
        groups = {id(group) for of_rank, group in used if of_rank == rank}
        assert len(groups) == num_groups
        assert (id(comm) in groups) == (algorithm == "shared_memory")


def test_a_failed_exchange_ends_the_measuring():
    def fail():
        raise CommunicationError("lost")

    runner = ThreadRunner()
    with pytest.raises(CommunicationError, match="lost"):
        contention._beside(lambda: None, fail, runner)
    runner.close()


@pytest.mark.parametrize(
    ("paused_s", "busy_s", "burst_s"),
    [
        ([0.006], [0.010], 0.004),
        ([0.0099], [0.010], 0.0),  # within a twentieth
        ([0.020], [0.010], 0.0),
        ([0.005, 0.006, 0.007], [0.009, 0.010, 0.011], 0.004),
        ([0.002, 0.006, 0.010], [0.006, 0.010, 0.014], 0.0),  # they overlap
    ],
)
def test_a_burst_is_what_a_pause_saves(monkeypatch, paused_s, busy_s, burst_s):
    """By the clock: exchanges after a pause, and right after another, which take this long."""
    kinds = [("fp32", "native")]
    alone = run_ranks(2, lambda comm: collectives.measure_collectives(comm, kinds)[0])[0]
    ticks = itertools.chain.from_iterable((0.0, seconds) for seconds in itertools.cycle(paused_s))
    busy = itertools.cycle(busy_s)
    monkeypatch.setattr(collectives, "BucketExchange", _Nothing)
    monkeypatch.setattr(collectives, "sleep", lambda _: None)
    monkeypatch.setattr(collectives, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(collectives, "_seconds_of", lambda comm, bucket, num_runs: next(busy))
    timed = replace(alone, seconds=(0.01, 0.02, 0.03))
    found_s = collectives.measure_burst_s(Communicator.single_process(), timed)
    assert found_s == pytest.approx(burst_s)


class _Nothing:
    num_at_once = 1

    def __init__(self, *_):
        pass

    def run(self):
        pass
