"""Bytes and seconds of a bucket's exchange: the alpha-beta-gamma model.

seconds = alpha * messages + beta * bytes + gamma * bytes that are summed
"""

from dataclasses import dataclass

from allstep.plan.algorithms import path_of, traffic_of
from allstep.plan.cluster import Cluster
from allstep.plan.compression import COMPRESSIONS, FLOAT32_BYTES, exchange_parts
from allstep.plan.nodes import Nodes
from allstep.plan.phases import Traffic


def collective_s(
    compression: str,
    algorithm: str,
    nodes: Nodes,
    num_elements: int,
    element_bytes: int = FLOAT32_BYTES,
) -> float:
    """Seconds in which the sum of `num_elements` of `element_bytes` each is on the wire.

    >>> from allstep.plan.nodes import Link
    >>> link = Link(bandwidth_bps=8e9, latency_s=0.001)
    >>> pair = Nodes(
    ...     num_nodes=2, workers_per_node=1, intra=link, inter=link, copy_bytes_per_s=1.5e12)
    >>> round(collective_s("fp32", "ring", pair, 250_000_000), 4)  # two halves, and their sum
    1.0025
    """
    return sum(
        step.seconds + nodes.reduce_s_per_byte * step.summed_bytes
        for phases, count, count_bytes in exchange_parts(
            compression, algorithm, nodes.num_workers, num_elements, element_bytes
        )
        for step in path_of(phases, nodes, count * count_bytes)
    )


def bucket_traffic(
    compression: str,
    algorithm: str,
    nodes: Nodes,
    rank: int,
    num_elements: int,
    element_bytes: int = FLOAT32_BYTES,
) -> Traffic:
    """What the worker of a rank sends so that all have the sum of a bucket, to the byte.

    >>> from allstep.plan.nodes import Link
    >>> four = Nodes(num_nodes=1, workers_per_node=4, intra=Link(bandwidth_bps=80e9))
    >>> bucket_traffic("fp32", "ring", four, 0, 1024).sent_bytes
    6144
    >>> bucket_traffic("fp32", "ring", four, 0, 1024, element_bytes=2).sent_bytes  # bfloat16
    3072
    >>> bucket_traffic("int8", "ring", four, 0, 1024).sent_bytes
    1560
    """
    parts = exchange_parts(compression, algorithm, nodes.num_workers, num_elements, element_bytes)
    sent = (traffic_of(phases, nodes, rank, *tensor) for phases, *tensor in parts)
    return sum(sent, start=Traffic())


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
    """Seconds and slowdowns of a bucket's exchange.

    Attributes:
        seconds: encoding and decoding included, with nothing beside it.
        latency_s: of these, what no head start of an idle link can save.
        compute_slowdown: how much longer compute takes beside it.
        communication_slowdown: how much longer it takes beside compute.
    """

    seconds: float = 0.0
    latency_s: float = 0.0
    compute_slowdown: float = 0.0
    communication_slowdown: float = 0.0


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
        compression: one of `COMPRESSIONS`.
        algorithm: one of `ALGORITHMS`.
        cluster: all of it takes part.
        num_elements: of the bucket.
        core_share: how much of the time compute needs the cores; it slows nothing where it sleeps.
        element_bytes: of the gradients; what was measured was float32, and counts by bytes sent.
    """
    if cluster.num_workers == 1:
        return BucketCost()
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
