"""The message patterns of which all-reduce algorithms and compressions consist.

[Note: shared links] All workers of a node share one link to the other nodes. In a ring, only one
worker of the node sends over it. In halving and doubling, and in the two-dimensional scheme, all
workers send at the same time, so each gets a share of the bandwidth. Hence an algorithm that is
fast between single workers may be the slowest one between nodes of eight.

Source: Thakur, Rabenseifner and Gropp, 2005; for the latency of a ring that crosses nodes NCCL's
own model (github.com/NVIDIA/nccl, src/graph/tuning.cc).
"""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from allstep.plan.nodes import Link, Nodes


@dataclass(frozen=True)
class Traffic:
    """The bytes and messages that a worker sends.

    >>> Traffic(10, 1) + Traffic(5, 2)
    Traffic(sent_bytes=15, num_messages=3)
    """

    sent_bytes: int = 0
    num_messages: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.sent_bytes + other.sent_bytes, self.num_messages + other.num_messages)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Messages that each worker sends one after the other on the same kind of link.

    Attributes:
        link: the kind of link they travel on.
        num_messages: number of successive messages per worker.
        num_bytes: total size of one worker's messages.
        sharing: number of workers that use the link at the same time. [Note: shared links]
        summed_bytes: bytes that the busiest worker adds to others.
    """

    link: Link
    num_messages: int
    num_bytes: float
    sharing: int = 1
    summed_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds until the last worker has sent its messages, without the additions."""
        return self.link.seconds(self.sharing * self.num_bytes, self.num_messages)


class Phase(Protocol):
    """A pattern of messages between two or more workers."""

    def traffic(self, nodes: Nodes, rank: int, num_elements: int, element_bytes: int) -> Traffic:
        """The traffic of the worker of a rank, for a tensor of `num_elements`."""

    def path(self, nodes: Nodes, num_bytes: float) -> list[Transfer]:
        """The critical path: successive transfers that all workers wait for."""


class Ring:
    """An all-reduce: chunks travel twice around a ring of all workers, and are added on the way."""

    def traffic(self, nodes: Nodes, rank: int, num_elements: int, element_bytes: int) -> Traffic:
        return _ring_traffic(nodes.num_workers, rank, num_elements, element_bytes)

    def path(self, nodes: Nodes, num_bytes: float) -> list[Transfer]:
        size = nodes.num_workers
        if nodes.between is None:
            return [_ring_transfer(nodes.intra, size, num_bytes)]
        summed_bytes = (size - 1) / size * num_bytes
        return _around_nodes(nodes, 2, num_bytes / size, summed_bytes)


class AllGather:
    """Sends each worker's elements to all others, around a ring."""

    def traffic(self, nodes: Nodes, rank: int, num_elements: int, element_bytes: int) -> Traffic:
        others = nodes.num_workers - 1
        return Traffic(others * num_elements * element_bytes, others)

    def path(self, nodes: Nodes, num_bytes: float) -> list[Transfer]:
        return _around_nodes(nodes, 1, num_bytes)


class AllToAll(AllGather):
    """Sends equally many elements from each worker directly to each other worker."""

    def path(self, nodes: Nodes, num_bytes: float) -> list[Transfer]:
        local = nodes.workers_per_node
        others = nodes.num_workers - local
        inside = Transfer(
            link=nodes.intra, num_messages=local - 1, num_bytes=(local - 1) * num_bytes
        )
        if nodes.between is None:
            return [inside]
        return [
            inside,
            Transfer(
                link=nodes.between,
                num_messages=others,
                num_bytes=others * num_bytes,
                sharing=local,
            ),
        ]


@dataclass(frozen=True)
class Pairs:
    """Rounds of exchanges between pairs of workers, whose distance halves from round to round.

    A power of two of workers take part; each further worker first sends its tensor to one of them,
    and gets the sum back at the end.

    Attributes:
        halves: whether partners exchange halves of what they had in the previous round, and later
            the sums of these; else they exchange all they have.
    """

    halves: bool

    def traffic(self, nodes: Nodes, rank: int, num_elements: int, element_bytes: int) -> Traffic:
        size = nodes.num_workers
        power = 1 << (size.bit_length() - 1)
        everything = _message(num_elements * element_bytes)
        if rank >= power:
            return everything
        total = everything if rank < size - power else Traffic()
        own, distance = num_elements, power // 2
        while distance:
            if self.halves:
                low, high = _chunk(own, 2, 0), _chunk(own, 2, 1)
                own, other = (high, low) if rank & distance else (low, high)
                total += _message(other * element_bytes)
            total += _message(own * element_bytes)
            distance //= 2
        return total

    def path(self, nodes: Nodes, num_bytes: float) -> list[Transfer]:
        size = nodes.num_workers
        power = 1 << (size.bit_length() - 1)
        levels = range(1, power.bit_length())
        if self.halves:
            path = [_swap(nodes, power, power >> n, num_bytes / (1 << n), 2) for n in levels]
        else:
            path = [_swap(nodes, power, power >> n, num_bytes, 1) for n in levels]
        return path if power == size else [*path, _swap(nodes, size, power, num_bytes, 2)]


class NodeRoot:
    """The node's first worker receives the others' tensors, one by one, and sends back the sum."""

    def traffic(self, nodes: Nodes, rank: int, num_elements: int, element_bytes: int) -> Traffic:
        if nodes.has_shared_memory:
            return Traffic()
        local = nodes.workers_per_node
        num_messages = 1 if rank % local else local - 1
        return Traffic(num_messages * num_elements * element_bytes, num_messages)

    def path(self, nodes: Nodes, num_bytes: float) -> list[Transfer]:
        if nodes.has_shared_memory:
            return _through_memory(nodes, num_bytes)
        others = nodes.workers_per_node - 1
        return [
            Transfer(
                link=nodes.intra,
                num_messages=2 * others,
                num_bytes=2 * others * num_bytes,
                summed_bytes=others * num_bytes,
            )
        ]


class NodeRing:
    """A ring within each node."""

    def traffic(self, nodes: Nodes, rank: int, num_elements: int, element_bytes: int) -> Traffic:
        local = nodes.workers_per_node
        return _ring_traffic(local, rank % local, num_elements, element_bytes)

    def path(self, nodes: Nodes, num_bytes: float) -> list[Transfer]:
        return [_ring_transfer(nodes.intra, nodes.workers_per_node, num_bytes)]


@dataclass(frozen=True)
class AcrossNodes:
    """Rings through one worker of each node.

    Attributes:
        from_all: whether each worker of a node is in a ring, with its part of the tensor; else only
            the first one is, with the whole tensor.
    """

    from_all: bool

    def traffic(self, nodes: Nodes, rank: int, num_elements: int, element_bytes: int) -> Traffic:
        node, local_rank = divmod(rank, nodes.workers_per_node)
        if self.from_all:
            num_elements = _chunk(num_elements, nodes.workers_per_node, local_rank + 1)
        elif local_rank:
            return Traffic()
        return _ring_traffic(nodes.num_nodes, node, num_elements, element_bytes)

    def path(self, nodes: Nodes, num_bytes: float) -> list[Transfer]:
        if nodes.between is None:
            return []
        sharing = nodes.workers_per_node if self.from_all else 1
        return [_ring_transfer(nodes.between, nodes.num_nodes, num_bytes / sharing, sharing)]


class SharedMemory(Ring):
    """Sums in the shared memory of one node; for several nodes, the backend's own all-reduce."""

    def traffic(self, nodes: Nodes, rank: int, num_elements: int, element_bytes: int) -> Traffic:
        if nodes.num_nodes == 1:
            return Traffic()
        return super().traffic(nodes, rank, num_elements, element_bytes)

    def path(self, nodes: Nodes, num_bytes: float) -> list[Transfer]:
        if nodes.num_nodes == 1:
            return _through_memory(nodes, num_bytes)
        return super().path(nodes, num_bytes)


def _chunk(num_elements: int, parts: int, index: int) -> int:
    """The number of elements of a part that `torch.tensor_split` returns."""
    return num_elements // parts + (index % parts < num_elements % parts)


def _message(num_bytes: int) -> Traffic:
    """The traffic of a message; empty ones are not sent."""
    return Traffic(num_bytes, 1) if num_bytes else Traffic()


def _ring_traffic(size: int, rank: int, num_elements: int, element_bytes: int) -> Traffic:
    """All chunks but one, twice: rank r sends neither chunk r + 1 first, nor r + 2 later."""
    kept = [_chunk(num_elements, size, rank + offset) for offset in (1, 2)]
    return Traffic(
        (2 * num_elements - sum(kept)) * element_bytes,
        2 * min(num_elements, size) - sum(chunk > 0 for chunk in kept),
    )


def _ring_transfer(link: Link, size: int, num_bytes: float, sharing: int = 1) -> Transfer:
    """The transfer of an all-reduce around a ring whose links are all of one kind."""
    hops = 2 * (size - 1)
    return Transfer(
        link=link,
        num_messages=hops,
        num_bytes=hops / size * num_bytes,
        sharing=sharing,
        summed_bytes=hops / size * num_bytes / 2,
    )


def _around_nodes(
    nodes: Nodes, rounds: int, chunk_bytes: float, summed_bytes: float = 0.0
) -> list[Transfer]:
    """The transfers of chunks that travel `rounds` times around a ring through all nodes.

    All links carry chunks at the same time, so the slowest link determines the bandwidth; each hop
    of a chunk adds the latency of its link.
    """
    hops = rounds * (nodes.num_workers - 1)
    if nodes.between is None:
        return [Transfer(link=nodes.intra, num_messages=hops, num_bytes=hops * chunk_bytes)]
    inter_hops = rounds * (nodes.num_nodes - 1)
    slowest = nodes.between
    if nodes.workers_per_node > 1:
        slowest = min(nodes.between, nodes.intra, key=lambda link: link.bandwidth_bps)
    crossing = Link(bandwidth_bps=slowest.bandwidth_bps, latency_s=nodes.between.latency_s)
    return [
        Transfer(link=nodes.intra, num_messages=hops - inter_hops, num_bytes=0.0),
        Transfer(
            link=crossing,
            num_messages=inter_hops,
            num_bytes=hops * chunk_bytes,
            summed_bytes=summed_bytes,
        ),
    ]


def _through_memory(nodes: Nodes, num_bytes: float) -> list[Transfer]:
    """A copy into shared memory and one out; sums are taken while a piece is in the cache."""
    local = nodes.workers_per_node
    memory = Link(bandwidth_bps=8 * nodes.copy_bytes_per_s, latency_s=nodes.intra.latency_s)
    summed_bytes = (local - 1) / local * num_bytes
    return [
        Transfer(link=memory, num_messages=2, num_bytes=2 * num_bytes, summed_bytes=summed_bytes)
    ]


def _swap(
    nodes: Nodes, num_ranks: int, distance: int, message_bytes: float, num_messages: int
) -> Transfer:
    """The simultaneous exchanges of the first `num_ranks` ranks with rank XOR `distance`."""
    link, sharing = nodes.intra, 1
    if nodes.between is not None:
        num_crossing = _num_crossing(num_ranks, nodes.workers_per_node, distance)
        link, sharing = (nodes.between, num_crossing) if num_crossing else (link, sharing)
    return Transfer(
        link=link,
        num_messages=num_messages,
        num_bytes=num_messages * message_bytes,
        sharing=sharing,
        summed_bytes=message_bytes,
    )


@cache
def _num_crossing(num_ranks: int, per_node: int, distance: int) -> int:
    """The largest number of workers of one node whose partner is on another node.

    >>> _num_crossing(8, 4, 2), _num_crossing(8, 4, 4)
    (0, 4)
    >>> _num_crossing(4, 3, 1), _num_crossing(4, 3, 2)  # ranks 2 and 3, and 1 and 3
    (1, 1)
    """
    ranks = np.arange(num_ranks)
    partners = ranks ^ distance
    has_partner = partners < num_ranks
    nodes, others = ranks[has_partner] // per_node, partners[has_partner] // per_node
    return int(np.bincount(nodes[nodes != others], minlength=1).max())
