"""Bytes and seconds of a bucket's exchange, by the alpha-beta-gamma model.

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
    """Seconds of an exchange of `num_elements` of `element_bytes` each, without encoding.

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
    """The exact traffic of the worker of a rank in the exchange of a bucket.

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
    """Seconds to encode and decode `num_elements`, limited by memory bandwidth.

    A copy reads and writes each byte, so reading or writing n bytes takes as long as copying n / 2.
    """
    touched_bytes = COMPRESSIONS[compression].touched_bytes(element_bytes) * num_elements
    return touched_bytes / (2 * cluster.copy_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """Seconds and slowdowns of a bucket's exchange.

    Attributes:
        seconds: seconds with encoding and decoding, while nothing else runs.
        latency_s: the part of `seconds` that the credit of an idle link can't save.
        compute_slowdown: how much longer compute takes during the exchange; 0.1 is 10 %.
        communication_slowdown: how much longer the exchange takes during compute; 0.1 is 10 %.
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
        cluster: the cluster; all its workers take part.
        num_elements: number of elements of the bucket.
        core_share: share of the time in which compute needs the cores; only then do compute and
            the exchange slow each other down.
        element_bytes: bytes of a gradient's element. Measurements are of float32; for other sizes
            they are scaled by the bytes that are sent.
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
