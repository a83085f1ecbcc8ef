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
    found = measure(Communicator.single_process(), effort=HURRY)
    assert found.pairs == found.collectives == ()
    assert found.intra is found.inter is None
    assert found.cluster().num_workers == 1


def test_workers_of_one_host_share_memory():
    found = run_ranks(2, lambda comm: measure(comm, ("fp32", "fp16"), HURRY))[0]
    assert [(c.compression, c.algorithm) for c in found.collectives] == [
        ("fp32", "native"),
        ("fp32", "shared_memory"),
        ("fp16", "shared_memory"),
    ]
    assert found.burst_s == 0.0
    assert found.cluster().has_shared_memory
