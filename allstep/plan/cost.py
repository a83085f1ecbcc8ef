"""Seconds of a collective from latency, bandwidth and memory: the alpha-beta-gamma model.

seconds = alpha * messages + beta * bytes + gamma * bytes that are summed

[Note: shared links] A node's link to the others is one for all its workers. A ring sends over it
once for the whole node; halving and doubling, and the two-dimensional scheme, do so from every
worker at once and get a share each, which is why a fast algorithm between single workers may be
the slowest between nodes of eight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from allstep.plan.cluster import Cluster, Link
from allstep.plan.compression import COMPRESSIONS, FLOAT32_BYTES
from allstep.plan.sums import num_sums
from allstep.plan.traffic import ALGORITHMS

__all__ = [
    "BucketCost",
    "Stage",
    "all_reduce_s",
    "bucket_cost",
    "collective_s",
    "encode_s",
    "stages",
]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Messages of each worker that follow one another on the same kind of link.

    Attributes:
        link: which they take.
        num_messages: one after the other.
        num_bytes: of all of them.
        sharing: workers that use the link at once. [Note: shared links]
    """

    link: Link
    num_messages: int
    num_bytes: float
    sharing: int = 1

    @property
    def seconds(self) -> float:
        """Seconds until the last worker is through."""
        return self.link.seconds(self.sharing * self.num_bytes, self.num_messages)


def stages(algorithm: str, cluster: Cluster, num_bytes: float) -> list[Stage]:
    """What an all-reduce of `num_bytes` does on all workers of `cluster`, step by step.

    Args:
        algorithm: one of `ALGORITHMS`.
        cluster: all of it takes part.
        num_bytes: of the tensor.

    Source: Thakur, Rabenseifner and Gropp, 2005; for the latency of a ring that crosses nodes
    NCCL's own model (github.com/NVIDIA/nccl, src/graph/tuning.cc).
    """
    if cluster.num_workers == 1:
        return []
    return _STAGES[algorithm](cluster, num_bytes)


def _ring(cluster: Cluster, num_bytes: float) -> list[Stage]:
    return _circulate(cluster, 2, num_bytes / cluster.num_workers)


def _circulate(cluster: Cluster, rounds: int, chunk_bytes: float) -> list[Stage]:
    """Chunks that travel `rounds` times around a ring through all nodes.

    All links carry all chunks at once, so the slowest one sets the pace; a chunk meets each
    link's latency as often as it crosses one.
    """
    hops = rounds * (cluster.num_workers - 1)
    if cluster.inter is None or cluster.num_nodes == 1:
        return [Stage(link=cluster.intra, num_messages=hops, num_bytes=hops * chunk_bytes)]
    inter_hops = rounds * (cluster.num_nodes - 1)
    crossing = Link(
        bandwidth_bps=_slower(cluster.inter, cluster.intra, cluster.workers_per_node),
        latency_s=cluster.inter.latency_s,
    )
    return [
        Stage(link=cluster.intra, num_messages=hops - inter_hops, num_bytes=0.0),
        Stage(link=crossing, num_messages=inter_hops, num_bytes=hops * chunk_bytes),
    ]


def _slower(inter: Link, intra: Link, workers_per_node: int) -> float:
    if workers_per_node == 1:
        return inter.bandwidth_bps
    return min(inter.bandwidth_bps, intra.bandwidth_bps)


def _halving_doubling(cluster: Cluster, num_bytes: float) -> list[Stage]:
    return _folded(cluster, num_bytes, lambda level: num_bytes / (1 << level), num_messages=2)


def _recursive_doubling(cluster: Cluster, num_bytes: float) -> list[Stage]:
    return _folded(cluster, num_bytes, lambda level: num_bytes, num_messages=1)


def _folded(
    cluster: Cluster,
    num_bytes: float,
    message_bytes: Callable[[int], float],
    *,
    num_messages: int,
) -> list[Stage]:
    """A power of two of workers in rounds, whose partners are half as far away in each.

    Workers beyond give a partner all they have first, and get it back.
    """
    size = cluster.num_workers
    power = 1 << (size.bit_length() - 1)
    rounds = [
        _exchange(cluster, power, power >> level, message_bytes(level), num_messages)
        for level in range(1, power.bit_length())
    ]
    if power == size:
        return rounds
    return [*rounds, _exchange(cluster, size, power, num_bytes, 2)]


def _exchange(
    cluster: Cluster, num_ranks: int, distance: int, num_bytes: float, num_messages: int
) -> Stage:
    """Pairs of the first ranks, whose numbers differ by the bit `distance`, all at once."""
    link, sharing = cluster.intra, 1
    if cluster.inter is not None:
        num_crossing = _num_crossing(num_ranks, cluster.workers_per_node, distance)
        link, sharing = (cluster.inter, num_crossing) if num_crossing else (cluster.intra, 1)
    return Stage(
        link=link,
        num_messages=num_messages,
        num_bytes=num_messages * num_bytes,
        sharing=sharing,
    )


@cache
def _num_crossing(num_ranks: int, per_node: int, distance: int) -> int:
    """Most workers of one node whose partner is in another.

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


def _hierarchical(cluster: Cluster, num_bytes: float) -> list[Stage]:
    """The node's first worker gets everyone's tensor, one after the other, and gives it back."""
    if cluster.has_shared_memory:
        inside = _memory(cluster, num_bytes)
    else:
        others = cluster.workers_per_node - 1
        inside = Stage(
            link=cluster.intra, num_messages=2 * others, num_bytes=2 * others * num_bytes
        )
    return [inside, *_between_nodes(cluster, num_bytes, sharing=1)]


def _two_dimensional(cluster: Cluster, num_bytes: float) -> list[Stage]:
    local = cluster.workers_per_node
    inside = Stage(
        link=cluster.intra,
        num_messages=2 * (local - 1),
        num_bytes=2 * (local - 1) / local * num_bytes,
    )
    return [inside, *_between_nodes(cluster, num_bytes / local, sharing=local)]


def _between_nodes(cluster: Cluster, num_bytes: float, *, sharing: int) -> list[Stage]:
    nodes = cluster.num_nodes
    if cluster.inter is None or nodes == 1:
        return []
    hops = 2 * (nodes - 1)
    return [
        Stage(
            link=cluster.inter,
            num_messages=hops,
            num_bytes=hops / nodes * num_bytes,
            sharing=sharing,
        )
    ]


def _shared_memory(cluster: Cluster, num_bytes: float) -> list[Stage]:
    """As `native` beyond one node, where memory can't be shared."""
    if cluster.num_nodes > 1:
        return _ring(cluster, num_bytes)
    return [_memory(cluster, num_bytes)]


def _memory(cluster: Cluster, num_bytes: float) -> Stage:
    """A copy in and a copy out; the sum is taken while a piece is in the cache."""
    memory = Link(bandwidth_bps=8 * cluster.copy_bytes_per_s, latency_s=cluster.intra.latency_s)
    return Stage(link=memory, num_messages=2, num_bytes=2 * num_bytes)


def _nothing(cluster: Cluster, num_bytes: float) -> list[Stage]:
    return []


_STAGES: Mapping[str, Callable[[Cluster, float], list[Stage]]] = {
    "native": _ring,
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "recursive_doubling": _recursive_doubling,
    "hierarchical": _hierarchical,
    "two_dimensional": _two_dimensional,
    "shared_memory": _shared_memory,
    "dummy": _nothing,
}
assert set(_STAGES) == set(ALGORITHMS)


def all_reduce_s(algorithm: str, cluster: Cluster, num_bytes: float) -> float:
    """Seconds of an all-reduce of `num_bytes` over all workers of `cluster`.

    >>> link = Link(bandwidth_bps=8e9, latency_s=0.001)
    >>> pair = Cluster(name="", num_nodes=2, workers_per_node=1, intra=link, inter=link,
    ...     copy_bytes_per_s=1.5e12)
    >>> round(all_reduce_s("ring", pair, 1e9), 4)  # two messages of half the bytes; their sum
    1.0025
    """
    wire_s = sum(stage.seconds for stage in stages(algorithm, cluster, num_bytes))
    return wire_s + cluster.reduce_s_per_byte * num_sums(algorithm, cluster) * num_bytes


def collective_s(
    compression: str,
    algorithm: str,
    cluster: Cluster,
    num_elements: int,
    element_bytes: int = FLOAT32_BYTES,
) -> float:
    """Seconds in which the sum of `num_elements` of `element_bytes` each is on the wire."""
    wire = COMPRESSIONS[compression]
    sent_bytes = wire.sent_bytes(element_bytes)
    if cluster.num_workers == 1:
        return 0.0
    if wire.rank is not None:
        factor_bytes = sent_bytes * wire.num_low_rank(num_elements) / 2
        return 2 * all_reduce_s(algorithm, cluster, factor_bytes)
    if wire.keep is not None:
        kept_bytes = wire.keep * num_elements * (sent_bytes + 4)
        return sum(stage.seconds for stage in _circulate(cluster, 1, kept_bytes))
    if wire.block is not None:
        return _quantised_s(wire.block, sent_bytes, cluster, num_elements)
    return all_reduce_s(algorithm, cluster, sent_bytes * num_elements)


def _quantised_s(block: int, code_bytes: int, cluster: Cluster, num_elements: int) -> float:
    """Rows to their owners, sums there, and sums to all."""
    row_bytes = num_elements / cluster.num_workers * (code_bytes + 4 / block)
    local, size = cluster.workers_per_node, cluster.num_workers
    scatter = [Stage(link=cluster.intra, num_messages=local - 1, num_bytes=(local - 1) * row_bytes)]
    if cluster.inter is not None and cluster.num_nodes > 1:
        others = size - local
        scatter.append(
            Stage(
                link=cluster.inter,
                num_messages=others,
                num_bytes=others * row_bytes,
                sharing=local,
            )
        )
    gather = _circulate(cluster, 1, row_bytes)
    return sum(stage.seconds for stage in (*scatter, *gather))


def encode_s(
    compression: str, cluster: Cluster, num_elements: int, element_bytes: int = FLOAT32_BYTES
) -> float:
    """Seconds to encode and decode `num_elements`, at the memory's speed.

    A copy reads and writes each byte, so that n bytes touched take the time of copying n / 2.
    """
    touched_bytes = COMPRESSIONS[compression].touched_bytes(element_bytes) * num_elements
    return touched_bytes / (2 * cluster.copy_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """What exchanging a bucket comes to.

    Attributes:
        seconds: encoding and decoding included, with nothing beside it.
        latency_s: of these, what no head start of an idle link can save.
        compute_slowdown: how much longer compute takes beside it.
        communication_slowdown: how much longer it takes beside compute.
    """

    seconds: float
    latency_s: float
    compute_slowdown: float
    communication_slowdown: float


def bucket_cost(
    compression: str,
    algorithm: str,
    cluster: Cluster,
    num_elements: int,
    core_share: float = 1.0,
    element_bytes: int = FLOAT32_BYTES,
) -> BucketCost:
    """The cost of a bucket as measured on these workers, else by the formulas.

    Args:
        compression: format.
        algorithm: one of `ALGORITHMS`.
        cluster: all of it takes part.
        num_elements: of the bucket.
        core_share: how much of the time compute needs the cores; it slows nothing where it sleeps.
        element_bytes: of the gradients; what was measured was float32, and counts by bytes sent.
    """
    if cluster.num_workers == 1:
        return BucketCost(
            seconds=0.0, latency_s=0.0, compute_slowdown=0.0, communication_slowdown=0.0
        )
    timed = cluster.measured(compression, algorithm)
    if timed is None:
        seconds = collective_s(compression, algorithm, cluster, num_elements, element_bytes)
        return BucketCost(
            seconds=seconds + encode_s(compression, cluster, num_elements, element_bytes),
            latency_s=collective_s(compression, algorithm, cluster, 0),
            compute_slowdown=core_share * cluster.compute_slowdown,
            communication_slowdown=core_share * cluster.communication_slowdown,
        )
    wire = COMPRESSIONS[compression]
    ratio = wire.sent_bytes(element_bytes) / wire.sent_bytes(FLOAT32_BYTES)
    return BucketCost(
        seconds=timed.seconds_of(round(ratio * num_elements)),
        latency_s=timed.latency_s,
        compute_slowdown=core_share * timed.compute_slowdown,
        communication_slowdown=core_share * timed.communication_slowdown,
    )
