"""What `measure` finds out about some workers, and the file that keeps it."""

import json

import pytest

from allstep.comm import Communicator
from allstep.doctor import Effort, PairTiming, measure, read_measurements
from allstep.doctor.links import slowest
from allstep.errors import UsageError
from allstep.plan import POLICIES, Link, TrainingSpec, Workload, predict
from tests.helpers.ranks import run_ranks

# Small sizes and few repeats: what is tested is what is said, not how fast it is.
HURRY = Effort(
    bucket_sizes_bytes=(1 << 12, 1 << 14, 1 << 16),
    message_sizes_bytes=(1 << 10, 1 << 14, 1 << 16),
    copy_bytes=1 << 16,
    matrix_size=64,
    batch_s=0.001,
    pause_s=0.001,
)


@pytest.fixture(scope="module")
def kept():
    """One measurement of four ranks on two hosts, for several tests."""
    return run_ranks(4, lambda comm: measure(comm, effort=HURRY), local_size=2)


def test_measure_gives_all_workers_the_same(kept):
    first, *others = kept
    assert all(other == first for other in others)


def test_measure_has_everything_that_the_planner_needs(kept):
    found = kept[0]
    cluster = found.cluster
    assert (cluster.num_nodes, cluster.workers_per_node) == (2, 2)
    assert found.gemm_flops > 0 and cluster.copy_bytes_per_s > 0 and cluster.gradient_s >= 0
    assert [(c.compression, c.algorithm) for c in cluster.collectives] == [
        ("fp32", "native"),
        ("fp16", "native"),
        ("int8", "native"),
    ]
    predictions = predict(
        TrainingSpec(micro=Workload.from_step(num_params=10_000, step_s=0.1)),
        cluster,
        POLICIES,
        [2, 4],
    )
    assert all(p.report.step_s > 0.05 for p in predictions)


def test_measure_pairs_times_every_two_hosts_and_each_neighbour(kept):
    pairs = kept[0].pairs
    assert [(pair.ranks, pair.same_host) for pair in pairs] == [
        ((0, 1), True),
        ((0, 2), False),
        ((2, 3), True),
    ]
    assert kept[0].cluster.inter == next(pair.link for pair in pairs if not pair.same_host)


def test_slowest_link_of_pairs():
    pairs = [
        PairTiming(ranks=(0, 1), same_host=True, link=Link(bandwidth_bps=9e9, latency_s=1e-6)),
        PairTiming(ranks=(0, 2), same_host=True, link=Link(bandwidth_bps=5e9, latency_s=1e-7)),
    ]
    assert slowest(pairs, same_host=True) == Link(bandwidth_bps=5e9, latency_s=1e-6)
    assert slowest(pairs, same_host=False) is None


def test_measurements_survive_their_file(kept, tmp_path):
    path = tmp_path / "here.json"
    kept[0].write(path)
    assert read_measurements(path) == kept[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["here.json"]


def test_measurements_files_that_do_not_work(kept, tmp_path):
    with pytest.raises(UsageError, match=r"`path` \(=.*no/such.json\) can't be written"):
        kept[0].write(tmp_path / "no" / "such.json")
    with pytest.raises(UsageError, match=r"`path` \(=.*none.json\) can't be read"):
        read_measurements(tmp_path / "none.json")
    path = tmp_path / "here.json"
    for text in ("{", "[]", "{}", '{"cluster": {"intra": {"bandwidth_bps": 0}}}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"`path` \(=.*\) holds no measurements"):
            read_measurements(path)
    kept[0].write(path)
    table = json.loads(path.read_text())
    table["cluster"]["inter"]["bandwidth_bps"] = 0
    path.write_text(json.dumps(table))
    with pytest.raises(UsageError, match="`bandwidth_bps` \\(=0\\) must be above 0"):
        read_measurements(path)


def test_measure_of_a_single_worker():
    found = measure(Communicator.single_process(), effort=HURRY)
    assert found.pairs == found.cluster.collectives == ()
    assert found.cluster.inter is None
    assert found.cluster.num_workers == 1


def test_measure_of_workers_that_share_memory():
    found = run_ranks(2, lambda comm: measure(comm, ("fp32", "fp16"), HURRY))[0]
    assert [(c.compression, c.algorithm) for c in found.cluster.collectives] == [
        ("fp32", "native"),
        ("fp32", "shared_memory"),
        ("fp16", "shared_memory"),
    ]
    assert found.cluster.burst_s == 0.0
    assert found.cluster.has_shared_memory
