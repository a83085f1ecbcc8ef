"""What the planner counts equals what the algorithms themselves count, message for message."""

import itertools

import pytest
import torch

from allstep.comm.algorithms import ALGORITHMS, make_algorithm
from allstep.errors import UsageError
from allstep.plan import traffic
from allstep.plan.traffic import Group, Traffic, all_reduce_traffic, split_evenly
from tests.helpers.ranks import run_ranks

SIZES = (1, 2, 3, 4, 7, 1000, 1001, 4099)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TENSORS = [(size, dtype) for size in SIZES for dtype in DTYPES]


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
def test_bytes_and_messages_are_those_of_the_algorithms(num_workers, local_size):
    num_nodes = num_workers // local_size
    names = set(ALGORITHMS) - {"auto"}
    found = run_ranks(
        num_workers,
        lambda comm: {name: counted(comm, name) for name in sorted(names)},
        local_size=local_size,
    )
    for rank in range(num_workers):
        group = Group(rank=rank, local_size=local_size, num_nodes=num_nodes, has_shared_memory=True)
        for name, sent in found[rank].items():
            expected = [
                all_reduce_traffic(name, group, size, dtype.itemsize) for size, dtype in TENSORS
            ]
            assert sent == expected, f"{name} on rank {rank}"


def test_the_planner_knows_every_algorithm():
    assert set(ALGORITHMS) - {"auto"} <= set(traffic.ALGORITHMS)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_elements", [0, 1, 4, 7, 1000])
def test_chunks_are_torchs(num_elements, parts):
    chunks = torch.empty(num_elements).tensor_split(parts)
    assert split_evenly(num_elements, parts) == [len(chunk) for chunk in chunks]


@pytest.mark.parametrize("size", [2, 3, 8, 100, 16384])
def test_a_ring_sends_its_bound(size):
    """2 (N - 1) / N of the tensor where it divides evenly; the sum over ranks always."""
    even = all_reduce_traffic("ring", Group(rank=1, local_size=size), 6 * size, 4)
    assert even == Traffic(2 * (size - 1) * 6 * 4, 2 * (size - 1))
    odd = [
        all_reduce_traffic("ring", Group(rank=rank, local_size=size), 6 * size + 1, 4)
        for rank in range(size)
    ]
    assert sum(sent.sent_bytes for sent in odd) == 2 * (size - 1) * (6 * size + 1) * 4


@pytest.mark.parametrize("size", [2, 4, 8, 16384])
def test_halving_and_doubling_sends_the_same_in_fewer_messages(size):
    sent = all_reduce_traffic("halving_doubling", Group(rank=0, local_size=size), 16384, 4)
    ring = all_reduce_traffic("ring", Group(rank=0, local_size=size), 16384, 4)
    assert sent.sent_bytes == ring.sent_bytes
    assert sent.num_messages == 2 * (size.bit_length() - 1)


def test_two_ranks_that_swap_send_no_more_than_a_ring_in_half_the_messages():
    pair = Group(rank=0, local_size=2)
    ring = all_reduce_traffic("ring", pair, 1000, 4)
    swap = all_reduce_traffic("recursive_doubling", pair, 1000, 4)
    assert (swap.sent_bytes, 2 * swap.num_messages) == (ring.sent_bytes, ring.num_messages)


def test_without_shared_memory_a_node_sends_to_its_first_worker():
    def sent(rank):
        group = Group(rank=rank, local_size=4, num_nodes=2)
        return all_reduce_traffic("hierarchical", group, 1000, 4)

    assert sent(1) == sent(7) == Traffic(4000, 1)
    assert sent(0) == sent(4) == Traffic(3 * 4000 + 4000, 3 + 2)


def test_lone_workers_and_empty_tensors_send_nothing():
    for algorithm in traffic.ALGORITHMS:
        assert all_reduce_traffic(algorithm, Group(rank=0, local_size=1), 100, 4) == Traffic()
        assert all_reduce_traffic(algorithm, Group(rank=0, local_size=4), 0, 4) == Traffic()


def test_an_unknown_algorithm_gets_the_nearest():
    with pytest.raises(UsageError, match=r"`algorithm` \(='rings'\): did you mean `ring`\?"):
        all_reduce_traffic("rings", Group(rank=0, local_size=2), 10, 4)
