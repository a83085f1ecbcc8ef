"""What the planner counts equals what the algorithms themselves count, message for message."""

import itertools

import pytest
import torch

from allstep.comm import Communicator
from allstep.comm.algorithms import ALGORITHMS as REAL
from allstep.comm.algorithms import make_algorithm
from allstep.comm.group import Topology
from allstep.plan.algorithms import ALGORITHMS, path_of, traffic_of
from allstep.plan.nodes import Link, Nodes
from allstep.plan.phases import Traffic
from tests.helpers.nodes import make_nodes
from tests.helpers.ranks import run_ranks

SIZES = (1, 2, 3, 4, 7, 1000, 1001, 4099)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TENSORS = [(size, dtype) for size in SIZES for dtype in DTYPES]
NAMES = sorted(set(REAL) - {"auto"})


def sent(algorithm, nodes, rank, num_elements, element_bytes=4):
    return traffic_of(ALGORITHMS[algorithm], nodes, rank, num_elements, element_bytes)


def counted(comm, algorithm):
    """Bytes and messages of this rank for each of `TENSORS`, as the algorithm counts them."""
    summed = make_algorithm(algorithm, comm)
    totals = [Traffic()]
    for size, dtype in TENSORS:
        summed.reduce_(torch.ones(size, dtype=dtype))
        totals.append(Traffic(summed.sent_bytes, summed.num_messages))
    summed.close()
    return [
        Traffic(late.sent_bytes - early.sent_bytes, late.num_messages - early.num_messages)
        for early, late in itertools.pairwise(totals)
    ]


@pytest.mark.parametrize(("num_workers", "local_size"), [(2, 2), (3, 3), (5, 5), (4, 2), (6, 3)])
def test_bytes_and_messages_are_those_of_the_real_algorithms(num_workers, local_size):
    nodes = make_nodes(local_size, num_workers // local_size, shares_memory=True)
    found = run_ranks(
        num_workers,
        lambda comm: {name: counted(comm, name) for name in NAMES},
        local_size=local_size,
    )
    for rank in range(num_workers):
        for name, traffic in found[rank].items():
            expected = [sent(name, nodes, rank, size, dtype.itemsize) for size, dtype in TENSORS]
            assert traffic == expected, f"{name} on rank {rank}"


def test_every_real_algorithm_has_a_row():
    assert set(NAMES) == set(ALGORITHMS)


class RecordingWire:
    """Another wire; keeps to whom how many bytes were sent."""

    def __init__(self, wire):
        self._wire = wire
        self.sent = []

    def __getattr__(self, name):
        return getattr(self._wire, name)

    def send(self, buffer, dest, *args):
        self.sent.append((dest, buffer.nbytes))
        return self._wire.send(buffer, dest, *args)

    def exchange(self, outgoing, dest, *args):
        self.sent.append((dest, outgoing.nbytes))
        return self._wire.exchange(outgoing, dest, *args)


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "recursive_doubling"])
@pytest.mark.parametrize(("num_nodes", "local_size"), [(2, 1), (2, 2), (4, 1), (4, 2), (2, 4)])
def test_bytes_that_leave_a_node_are_those_of_the_workers_that_share_its_link(
    algorithm, num_nodes, local_size
):
    num_elements = 960

    def sent_across(comm):
        wire = RecordingWire(comm.wire)
        place = Topology(comm.local_rank, comm.local_size, comm.node_rank, comm.num_nodes)
        recorded = Communicator(wire, place, comm.device)
        make_algorithm(algorithm, recorded).reduce_(torch.ones(num_elements))
        return sum(size for dest, size in wire.sent if dest // local_size != comm.node_rank)

    across = run_ranks(num_nodes * local_size, sent_across, local_size=local_size)
    leaving = [
        sum(across[first : first + local_size]) for first in range(0, len(across), local_size)
    ]
    inter = Link(bandwidth_bps=1e9, latency_s=1e-4)
    nodes = Nodes(
        num_nodes=num_nodes,
        workers_per_node=local_size,
        intra=Link(bandwidth_bps=1e12),
        inter=inter,
    )
    path = path_of(ALGORITHMS[algorithm], nodes, 4 * num_elements)
    assert max(leaving) == sum(t.sharing * t.num_bytes for t in path if t.link == inter)


@pytest.mark.parametrize(
    "algorithm", ["native", "ring", "halving_doubling", "recursive_doubling", "two_dimensional"]
)
@pytest.mark.parametrize(("num_nodes", "local_size"), [(1, 2), (1, 8), (2, 1), (4, 2), (16, 8)])
def test_the_path_has_the_bytes_and_messages_that_each_worker_sends(
    algorithm, num_nodes, local_size
):
    nodes, num_elements = make_nodes(local_size, num_nodes), 3 << 10
    path = path_of(ALGORITHMS[algorithm], nodes, 4 * num_elements)
    on_path = Traffic(sum(t.num_bytes for t in path), sum(t.num_messages for t in path))
    for rank in range(nodes.num_workers):
        assert sent(algorithm, nodes, rank, num_elements) == on_path


@pytest.mark.parametrize("size", [2, 3, 8, 100, 16384])
def test_a_ring_sends_its_lower_bound(size):
    """2 (N - 1) / N of the tensor where it divides evenly; the sum over ranks always."""
    nodes = make_nodes(size)
    assert sent("ring", nodes, 1, 6 * size) == Traffic(2 * (size - 1) * 6 * 4, 2 * (size - 1))
    odd = [sent("ring", nodes, rank, 6 * size + 1) for rank in range(size)]
    assert sum(traffic.sent_bytes for traffic in odd) == 2 * (size - 1) * (6 * size + 1) * 4


@pytest.mark.parametrize("size", [2, 4, 8, 16384])
def test_halving_and_doubling_sends_a_rings_bytes_in_fewer_messages(size):
    traffic = sent("halving_doubling", make_nodes(size), 0, 16384)
    assert traffic.sent_bytes == sent("ring", make_nodes(size), 0, 16384).sent_bytes
    assert traffic.num_messages == 2 * (size.bit_length() - 1)


def test_two_ranks_that_double_send_a_rings_bytes_in_half_the_messages():
    ring = sent("ring", make_nodes(2), 0, 1000)
    swap = sent("recursive_doubling", make_nodes(2), 0, 1000)
    assert (swap.sent_bytes, 2 * swap.num_messages) == (ring.sent_bytes, ring.num_messages)


def test_hierarchical_without_shared_memory_sends_to_the_first_worker_of_a_node():
    nodes = make_nodes(4, 2)
    assert sent("hierarchical", nodes, 1, 1000) == Traffic(4000, 1)
    assert sent("hierarchical", nodes, 7, 1000) == Traffic(4000, 1)
    assert sent("hierarchical", nodes, 0, 1000) == Traffic(3 * 4000 + 4000, 3 + 2)
    assert sent("hierarchical", nodes, 4, 1000) == Traffic(3 * 4000 + 4000, 3 + 2)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_one_worker_and_empty_tensors_send_nothing(algorithm):
    assert sent(algorithm, make_nodes(1), 0, 100) == Traffic()
    assert sent(algorithm, make_nodes(4), 0, 0) == Traffic()
