import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allstep.comm.algorithms import Hierarchical, Ring, TwoDimensional, make_algorithm
from allstep.plan.cluster import Cluster, Link
from allstep.plan.compression import COMPRESSIONS, wire_traffic
from allstep.plan.cost import all_reduce_s, collective_s, encode_s, stages
from allstep.plan.traffic import ALGORITHMS, Group
from tests.helpers.ranks import run_ranks

ALPHA, BETA = 2e-5, 8 / 10e9
GAMMA = 1.5 / 20e9
K = 40e6
INTER = Link(bandwidth_bps=10e9, latency_s=ALPHA)
INTRA = Link(bandwidth_bps=400e9, latency_s=1e-6)


def hosts(num_nodes, workers_per_node=1, **changes):
    return Cluster(
        name="",
        num_nodes=num_nodes,
        workers_per_node=workers_per_node,
        intra=INTRA,
        inter=INTER,
        copy_bytes_per_s=20e9,
        **changes,
    )


@pytest.mark.parametrize("p", [2, 3, 5, 8, 64, 1024])
def test_a_ring_costs_what_the_books_say(p):
    expected = 2 * (p - 1) * ALPHA + 2 * (p - 1) / p * K * BETA + (p - 1) / p * K * GAMMA
    assert all_reduce_s("ring", hosts(p), K) == pytest.approx(expected)
    assert all_reduce_s("native", hosts(p), K) == pytest.approx(expected)


@pytest.mark.parametrize("p", [2, 4, 8, 64, 1024])
def test_halving_and_doubling_costs_what_the_books_say(p):
    rounds = p.bit_length() - 1
    expected = 2 * rounds * ALPHA + 2 * (p - 1) / p * K * BETA + (p - 1) / p * K * GAMMA
    assert all_reduce_s("halving_doubling", hosts(p), K) == pytest.approx(expected)


@pytest.mark.parametrize("p", [2, 4, 8, 64, 1024])
def test_recursive_doubling_costs_what_the_books_say(p):
    rounds = p.bit_length() - 1
    expected = rounds * (ALPHA + K * BETA + K * GAMMA)
    assert all_reduce_s("recursive_doubling", hosts(p), K) == pytest.approx(expected)


def test_a_worker_too_many_folds_in_at_the_price_of_two_whole_tensors():
    whole = INTER.seconds(2 * K, 2)
    four = sum(stage.seconds for stage in stages("halving_doubling", hosts(4), K))
    five = sum(stage.seconds for stage in stages("halving_doubling", hosts(5), K))
    assert five == pytest.approx(four + whole)


def test_a_ring_through_nodes_is_as_fast_as_its_slowest_link():
    """And meets the latency between nodes only where it leaves one."""
    p, nodes = 32, 4
    expected = (
        2 * (p - nodes) * INTRA.latency_s + 2 * (nodes - 1) * ALPHA + 2 * (p - 1) / p * K * BETA
    )
    found = sum(stage.seconds for stage in stages("ring", hosts(4, 8), K))
    assert found == pytest.approx(expected)


def test_two_dimensions_fill_a_nodes_link_from_all_its_workers():
    nodes, local = 4, 8
    inside = 2 * (local - 1) * INTRA.latency_s + 8 * 2 * (local - 1) / local * K / 400e9
    across = 2 * (nodes - 1) * ALPHA + 2 * (nodes - 1) / nodes * K * BETA
    found = sum(stage.seconds for stage in stages("two_dimensional", hosts(4, 8), K))
    assert found == pytest.approx(inside + across)


def test_a_hierarchy_pays_for_its_first_worker():
    nodes, local = 4, 8
    inside = INTRA.seconds(2 * (local - 1) * K, 2 * (local - 1))
    across = 2 * (nodes - 1) * ALPHA + 2 * (nodes - 1) / nodes * K * BETA
    found = sum(stage.seconds for stage in stages("hierarchical", hosts(4, 8), K))
    assert found == pytest.approx(inside + across)
    sharing = sum(
        stage.seconds for stage in stages("hierarchical", hosts(4, 8, has_shared_memory=True), K)
    )
    assert sharing == pytest.approx(2 * INTRA.latency_s + 2 * K / 20e9 + across)


def test_halving_from_eight_workers_shares_their_nodes_link():
    alone = sum(stage.seconds for stage in stages("halving_doubling", hosts(4, 1), K))
    sharing = sum(stage.seconds for stage in stages("halving_doubling", hosts(4, 8), K))
    assert 7 < sharing / alone < 9


def test_pairs_that_leave_their_node_take_the_slow_link():
    """Two nodes of three: 1 and 3 are a pair, and 2 and 3; then 4 and 5 give and get theirs."""
    found = stages("recursive_doubling", hosts(2, 3), K)
    across = [stage for stage in found if stage.link.latency_s == ALPHA]
    assert [stage.sharing for stage in across] == [1, 1, 2]
    assert len(found) == len(across)


def test_shared_memory_is_for_one_node():
    node = hosts(1, 4, has_shared_memory=True)
    found = sum(stage.seconds for stage in stages("shared_memory", node, K))
    assert found == pytest.approx(2 * INTRA.latency_s + 2 * K / 20e9)
    assert stages("shared_memory", hosts(4), K) == stages("ring", hosts(4), K)


class CountAdditions(TorchDispatchMode):
    """Elements that this thread has added up."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            self.num_elements += found.numel()
        return found


MAKERS = {
    "hierarchical": lambda comm: Hierarchical(comm, Ring),
    "hierarchical by messages": lambda comm: Hierarchical(comm, Ring, share_memory=False),
    "two_dimensional": lambda comm: TwoDimensional(comm, Ring),  # torch's own can't be counted
}


@pytest.mark.parametrize(
    ("name", "nodes", "local"),
    [
        *(("shared_memory", 1, local) for local in (2, 3, 5)),
        *(
            (name, *places)
            for name in ("ring", "halving_doubling", "recursive_doubling", *MAKERS)
            for places in ((1, 2), (1, 3), (1, 5), (2, 2), (2, 3), (3, 1))
        ),
    ],
)
def test_the_busiest_worker_adds_as_often_as_it_really_does(name, nodes, local):
    size, num_elements = nodes * local, 60 * 10_000

    def count(comm):
        make = MAKERS.get(name) or (lambda comm: make_algorithm(name, comm))
        summed, x = make(comm), torch.ones(num_elements)
        with CountAdditions() as counted:
            summed.reduce_(x)
        assert x[0] == size
        summed.close()
        return counted.num_elements

    busiest = max(run_ranks(size, count, local_size=local))
    algorithm, _, by_messages = name.partition(" ")
    cluster = hosts(nodes, local, has_shared_memory=not by_messages)
    sums_s = all_reduce_s(algorithm, cluster, K) - sum(
        stage.seconds for stage in stages(algorithm, cluster, K)
    )
    assert sums_s / (GAMMA * K) == pytest.approx(busiest / num_elements, rel=1e-3)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("wire", COMPRESSIONS)
def test_one_worker_pays_nothing(algorithm, wire):
    assert stages(algorithm, hosts(1), K) == []
    assert collective_s(wire, algorithm, hosts(1), 1000) == 0
    assert wire_traffic(wire, algorithm, Group(rank=0, local_size=1), 1000).sent_bytes == 0


@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize(
    ("wire", "share"),
    [("fp32", 1.0), ("fp16", 0.5), ("bf16", 0.5), ("int8", 0.25), ("exact", 2.0)],
)
def test_formats_send_their_share_at_any_number_of_workers(wire, share, size):
    n = 1 << 20
    group = Group(rank=0, local_size=size)
    plain = wire_traffic("fp32", "ring", group, n).sent_bytes
    found = wire_traffic(wire, "ring", group, n).sent_bytes
    assert found / plain == pytest.approx(share, rel=0.02)


def test_small_factors_and_few_elements_send_little():
    group = Group(rank=0, local_size=8)
    plain = wire_traffic("fp32", "ring", group, 1 << 20).sent_bytes
    assert wire_traffic("powersgd", "ring", group, 1 << 20).sent_bytes < plain / 50
    few, many = (
        wire_traffic("topk", "ring", Group(rank=0, local_size=size), 1 << 20).sent_bytes
        for size in (2, 200)
    )
    assert few < plain / 50
    assert many > plain  # what everyone keeps goes to everyone


@pytest.mark.parametrize("element_bytes", [2, 4, 8])
@pytest.mark.parametrize("wire", COMPRESSIONS)
@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_seconds_follow_the_bytes_on_a_wire_without_latency(wire, nodes, element_bytes):
    link = Link(bandwidth_bps=10e9)
    cluster = Cluster(
        name="", num_nodes=nodes, workers_per_node=1, intra=link, inter=link, copy_bytes_per_s=1e18
    )
    n = 1 << 20
    group = Group(rank=0, local_size=nodes)
    sent = wire_traffic(wire, "ring", group, n, element_bytes).sent_bytes
    seconds = collective_s(wire, "ring", cluster, n, element_bytes)
    assert seconds == pytest.approx(8 * sent / 10e9, rel=1e-3)


def test_sixteen_bits_gain_nothing_where_gradients_have_no_more():
    full, half = (collective_s(wire, "ring", hosts(4), 10**6, 2) for wire in ("fp32", "bf16"))
    assert full == half
    assert collective_s("fp32", "ring", hosts(4), 10**6) > 1.5 * half  # float32


def test_encoding_moves_memory():
    assert encode_s("fp32", hosts(2), 1000) == 0
    assert encode_s("fp16", hosts(2), 10**9) == pytest.approx(12 / 40)
    assert encode_s("fp16", hosts(2), 10**9, element_bytes=8) == pytest.approx(20 / 40)
