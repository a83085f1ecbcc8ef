import math

import pytest

from allstep.errors import UsageError
from allstep.plan.cluster import Cluster
from allstep.plan.cluster_files import parse_cluster, preset_names, read_cluster
from allstep.plan.nodes import Link

LINK = Link(bandwidth_bps=8e9, latency_s=1e-5)


def cluster(**changes):
    values = {"name": "c", "num_nodes": 4, "workers_per_node": 8, "intra": LINK, "inter": LINK}
    return Cluster(**{**values, **changes})


def test_link_seconds_are_latency_plus_bytes_over_bandwidth():
    assert LINK.seconds(1e9) == pytest.approx(1.00001)
    assert LINK.seconds(1e9, 3) == pytest.approx(1.00003)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_link_refuses_a_bandwidth_that_is_not_positive(value):
    with pytest.raises(UsageError, match=r"`bandwidth_bps` \(=.*\) must be above 0 and finite"):
        Link(bandwidth_bps=value)


@pytest.mark.parametrize("value", [-1e-6, math.nan, math.inf])
def test_link_refuses_a_negative_latency(value):
    with pytest.raises(UsageError, match=r"`latency_s` \(=.*\) must be 0 or more"):
        Link(bandwidth_bps=1e9, latency_s=value)


@pytest.mark.parametrize(
    ("num_workers", "expected"), [(1, (1, 1)), (6, (1, 6)), (8, (1, 8)), (16, (2, 8)), (32, (4, 8))]
)
def test_cluster_of_fills_node_by_node(num_workers, expected):
    part = cluster().of(num_workers)
    assert (part.num_nodes, part.workers_per_node) == expected
    assert part.num_workers == num_workers


@pytest.mark.parametrize(
    ("num_workers", "message"),
    [
        (0, r"`num_workers` \(=0\) must be at least 1"),
        (33, r"`num_workers` \(=33\) exceeds the 32 of cluster c \(4 nodes x 8\)"),
        (12, r"`num_workers` \(=12\) must fill nodes of 8 workers; nearest: 8, 16"),
    ],
)
def test_cluster_of_refuses_a_half_filled_node(num_workers, message):
    with pytest.raises(UsageError, match=message):
        cluster().of(num_workers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nodes": 0}, r"`num_nodes` \(=0\) must be at least 1"),
        ({"workers_per_node": 2.5}, r"`workers_per_node` \(=2.5\) must be a whole number"),
        ({"inter": None}, r"`inter` is missing, but `num_nodes` is 4"),
        ({"copy_bytes_per_s": 0}, r"`copy_bytes_per_s` \(=0\) must be above 0"),
        ({"samples_per_s": -1.0}, r"`samples_per_s` \(=-1.0\) must be above 0"),
        ({"compute_slowdown": -0.1}, r"`compute_slowdown` \(=-0.1\) must be 0 or more"),
        ({"communication_slowdown": math.nan}, r"`communication_slowdown` \(=nan\)"),
    ],
)
def test_cluster_refuses_contradictions(changes, message):
    with pytest.raises(UsageError, match=message):
        cluster(**changes)


def test_cluster_of_one_node_needs_no_inter_link():
    assert cluster(num_nodes=1, inter=None).num_workers == 8


GOOD = """
num_nodes = 2
workers_per_node = 4
[intra]
bandwidth_bps = 80e9
[inter]
bandwidth_bps = 10_000_000_000
latency_s = 30e-6
"""


def test_cluster_file_is_read(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(GOOD)
    found = read_cluster(str(path))
    assert found.name == "lab"
    assert found.num_workers == 8
    assert found.inter == Link(bandwidth_bps=10e9, latency_s=30e-6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "num_nodes = 2",
            "num_nodes = 2\nnum_workers = 9",
            "`num_workers` (=9) contradicts 2 nodes",
        ),
        ("num_nodes = 2", "num_node = 2", "`num_node` is no key of a cluster; did you mean"),
        ("num_nodes = 2", "", "`num_nodes` is missing."),
        ("num_nodes = 2", 'num_nodes = "two"', "`num_nodes` (='two') must be a whole number."),
        ("num_nodes = 2", "num_nodes = true", "`num_nodes` (=True) must be a whole number."),
        ("80e9", "0", "`intra.bandwidth_bps` (=0) must be above 0"),
        ("30e-6", "-1", "`inter.latency_s` (=-1) must be 0 or more"),
        ("latency_s", "latency_ms", "`inter.latency_ms` is no key of a cluster"),
        ("[intra]\nbandwidth_bps = 80e9", "intra = 80e9", "must be a table, such as [intra]"),
        ("[intra]\nbandwidth_bps = 80e9", "[intra]", "`intra.bandwidth_bps` is missing."),
        ("num_nodes = 2", "num_nodes =", "is no TOML file"),
    ],
)
def test_wrong_cluster_file_names_the_key(old, new, message):
    with pytest.raises(UsageError) as caught:
        parse_cluster(GOOD.replace(old, new, 1), "lab.toml")
    assert str(caught.value).startswith("lab.toml")
    assert message in str(caught.value)


def test_cluster_file_may_say_what_a_cluster_takes():
    found = parse_cluster("burst_s = 0.002\nsamples_per_s = 90\n" + GOOD, "lab.toml")
    assert (found.burst_s, found.samples_per_s) == (0.002, 90)


def test_cluster_file_without_inter_has_one_node():
    text = GOOD.split("[inter]")[0]
    with pytest.raises(UsageError, match="`inter` is missing"):
        parse_cluster(text, "lab.toml")
    assert parse_cluster(text.replace("= 2", "= 1", 1), "lab.toml").num_workers == 4


def test_cluster_name_without_file_or_preset_gets_the_nearest():
    with pytest.raises(UsageError, match=r"`cluster` \(=mn-2\) is neither.*did you mean `mn-1`\?"):
        read_cluster("mn-2")


def test_unreadable_cluster_file_is_named(tmp_path):
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="can't be read"):
        read_cluster(str(path))


PRESET_WORKERS = {
    "baidu-40": 40,
    "coates-cots": 64,
    "ethernet-100g": 512,
    "ethernet-10g": 512,
    "ethernet-25g": 512,
    "mn-1": 1024,
}


def test_preset_names_are_listed():
    assert preset_names() == list(PRESET_WORKERS)


@pytest.mark.parametrize(("name", "num_workers"), PRESET_WORKERS.items())
def test_presets_have_a_source(name, num_workers):
    found = read_cluster(name)
    assert found.name == name
    assert found.num_workers == num_workers
    assert "guess" in found.source
