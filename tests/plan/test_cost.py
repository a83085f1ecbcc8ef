import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allstep.comm.algorithms import Hierarchical, Ring, TwoDimensional, make_algorithm
from allstep.plan.algorithms import ALGORITHMS, path_of
from allstep.plan.cluster import Cluster
from allstep.plan.compression import COMPRESSIONS
from allstep.plan.cost import bucket_traffic, collective_s, encode_s
from allstep.plan.nodes import Link
from tests.helpers.nodes import make_nodes
from tests.helpers.ranks import run_ranks

ALPHA, BETA = 2e-5, 8 / 10e9
GAMMA = 1.5 / 20e9
K = 40e6
INTER = Link(bandwidth_bps=10e9, latency_s=ALPHA)
INTRA = Link(bandwidth_bps=400e9, latency_s=1e-6)


def all_reduce_s(algorithm, nodes, num_bytes):
    return collective_s("fp32", algorithm, nodes, round(num_bytes), element_bytes=1)


def path(algorithm, nodes):
    return path_of(ALGORITHMS[algorithm], nodes, K)


def path_s(algorithm, nodes):
    return sum(transfer.seconds for transfer in path(algorithm, nodes))


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
def test_ring_seconds_equal_the_closed_form(p):
    expected = 2 * (p - 1) * ALPHA + 2 * (p - 1) / p * K * BETA + (p - 1) / p * K * GAMMA
    assert all_reduce_s("ring", hosts(p), K) == pytest.approx(expected)
    assert all_reduce_s("native", hosts(p), K) == pytest.approx(expected)


@pytest.mark.parametrize("p", [2, 4, 8, 64, 1024])
def test_halving_doubling_seconds_equal_the_closed_form(p):
    rounds = p.bit_length() - 1
    expected = 2 * rounds * ALPHA + 2 * (p - 1) / p * K * BETA + (p - 1) / p * K * GAMMA
    assert all_reduce_s("halving_doubling", hosts(p), K) == pytest.approx(expected)


@pytest.mark.parametrize("p", [2, 4, 8, 64, 1024])
def test_recursive_doubling_seconds_equal_the_closed_form(p):
    rounds = p.bit_length() - 1
    expected = rounds * (ALPHA + K * BETA + K * GAMMA)
    assert all_reduce_s("recursive_doubling", hosts(p), K) == pytest.approx(expected)


def test_halving_beyond_a_power_of_two_adds_two_whole_tensors():
    whole = INTER.seconds(2 * K, 2)
    four = path_s("halving_doubling", hosts(4))
    five = path_s("halving_doubling", hosts(5))
    assert five == pytest.approx(four + whole)


def test_ring_through_nodes_is_as_fast_as_its_slowest_link():
    """And meets the latency between nodes only where it leaves one."""
    p, nodes = 32, 4
    expected = (
        2 * (p - nodes) * INTRA.latency_s + 2 * (nodes - 1) * ALPHA + 2 * (p - 1) / p * K * BETA
    )
    found = path_s("ring", hosts(4, 8))
    assert found == pytest.approx(expected)


def test_two_dimensional_shares_the_node_link_between_all_workers():
    nodes, local = 4, 8
    inside = 2 * (local - 1) * INTRA.latency_s + 8 * 2 * (local - 1) / local * K / 400e9
    across = 2 * (nodes - 1) * ALPHA + 2 * (nodes - 1) / nodes * K * BETA
    found = path_s("two_dimensional", hosts(4, 8))
    assert found == pytest.approx(inside + across)


def test_hierarchical_seconds_count_the_first_workers_messages():
    nodes, local = 4, 8
    inside = INTRA.seconds(2 * (local - 1) * K, 2 * (local - 1))
    across = 2 * (nodes - 1) * ALPHA + 2 * (nodes - 1) / nodes * K * BETA
    found = path_s("hierarchical", hosts(4, 8))
    assert found == pytest.approx(inside + across)
    sharing = path_s("hierarchical", hosts(4, 8, has_shared_memory=True))
    assert sharing == pytest.approx(2 * INTRA.latency_s + 2 * K / 20e9 + across)


def test_halving_doubling_of_eight_workers_shares_the_node_link():
    single = path_s("halving_doubling", hosts(4, 1))
    sharing = path_s("halving_doubling", hosts(4, 8))
    assert 7 < sharing / single < 9


def test_recursive_doubling_pairs_across_nodes_take_the_inter_link():
    """Two nodes of three: 1 and 3 are a pair, and 2 and 3; then 4 and 5 give and get theirs."""
    found = path("recursive_doubling", hosts(2, 3))
    across = [transfer for transfer in found if transfer.link.latency_s == ALPHA]
    assert [transfer.sharing for transfer in across] == [1, 1, 2]
    assert len(found) == len(across)


def test_shared_memory_beyond_one_node_is_a_ring():
    node = hosts(1, 4, has_shared_memory=True)
    found = path_s("shared_memory", node)
    assert found == pytest.approx(2 * INTRA.latency_s + 2 * K / 20e9)
    assert path("shared_memory", hosts(4)) == path("ring", hosts(4))


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
def test_summed_bytes_equal_the_real_additions_of_the_busiest_worker(name, nodes, local):
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
    sums_s = all_reduce_s(algorithm, cluster, K) - path_s(algorithm, cluster)
    assert sums_s / (GAMMA * K) == pytest.approx(busiest / num_elements, rel=1e-3)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_one_worker_has_no_cost(algorithm, compression):
    assert path(algorithm, hosts(1)) == []
    assert collective_s(compression, algorithm, hosts(1), 1000) == 0
    assert bucket_traffic(compression, algorithm, make_nodes(1), 0, 1000).sent_bytes == 0


@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize(
    ("compression", "share"),
    [("fp32", 1.0), ("fp16", 0.5), ("bf16", 0.5), ("int8", 0.25), ("exact", 1.0)],
)
def test_each_compression_sends_its_share_at_any_number_of_workers(compression, share, size):
    n = 1 << 20
    nodes = make_nodes(size)
    plain = bucket_traffic("fp32", "ring", nodes, 0, n).sent_bytes
    found = bucket_traffic(compression, "ring", nodes, 0, n).sent_bytes
    assert found / plain == pytest.approx(share, rel=0.02)


def test_powersgd_and_topk_send_little():
    nodes = make_nodes(8)
    plain = bucket_traffic("fp32", "ring", nodes, 0, 1 << 20).sent_bytes
    assert bucket_traffic("powersgd", "ring", nodes, 0, 1 << 20).sent_bytes < plain / 50
    few, many = (
        bucket_traffic("topk", "ring", make_nodes(size), 0, 1 << 20).sent_bytes for size in (2, 200)
    )
    assert few < plain / 50
    assert many > plain  # what everyone keeps goes to everyone


@pytest.mark.parametrize("element_bytes", [2, 4, 8])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_seconds_equal_bytes_over_bandwidth_without_latency(compression, nodes, element_bytes):
    link = Link(bandwidth_bps=10e9)
    cluster = Cluster(
        name="", num_nodes=nodes, workers_per_node=1, intra=link, inter=link, copy_bytes_per_s=1e18
    )
    n = 1 << 20
    sent = bucket_traffic(compression, "ring", cluster, 0, n, element_bytes).sent_bytes
    seconds = collective_s(compression, "ring", cluster, n, element_bytes)
    assert seconds == pytest.approx(8 * sent / 10e9, rel=1e-3)


def test_bf16_gains_nothing_for_sixteen_bit_gradients():
    full, half = (collective_s(name, "ring", hosts(4), 10**6, 2) for name in ("fp32", "bf16"))
    assert full == half
    assert collective_s("fp32", "ring", hosts(4), 10**6) > 1.5 * half  # float32


def test_encode_seconds_equal_the_memory_touched():
    assert encode_s("fp32", hosts(2), 1000) == 0
    assert encode_s("fp16", hosts(2), 10**9) == pytest.approx(12 / 40)
    assert encode_s("fp16", hosts(2), 10**9, element_bytes=8) == pytest.approx(20 / 40)
