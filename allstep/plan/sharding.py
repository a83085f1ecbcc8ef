"""The time of a step of a model whose states FSDP2 shards over some workers.

[Note: sharded step] FSDP2 wraps each of the model's `depth` blocks separately, and the remaining
layers together. In each micro-batch it gathers all parameters once forward and once backward, and
reduce-scatters the gradients: three times G seconds, where G is half of an all-reduce of the
parameters. If the shards have copies (HSDP), the sum over these takes R seconds more. All of this
overlaps with compute, except for the first gather and the last reduce-scatter of a part, so a
micro-batch of f + b seconds takes

    forward     max(f, G) + G / (depth + 1)
    backward    max(b, 2 G + R) + G / (depth + 1)

where compute and communication slow each other down as in any exchange. Nothing is left to exchange
at the end of the step. Each worker updates its shard.

In a pipeline each stage is sharded as a whole, so nothing overlaps: in each micro-batch a worker
waits G seconds forward and 2 G + R backward, for its own parameters.

Source: Zhao et al., 2023, arXiv:2304.11277.
"""

from dataclasses import replace

from allstep.plan.cluster import Cluster
from allstep.plan.cost import BucketCost, bucket_cost
from allstep.plan.mesh import MeshSpec
from allstep.plan.workload import Workload


def sharded_step(micro: Workload, depth: int, cluster: Cluster, mesh: MeshSpec) -> Workload:
    """A worker's step of one micro-batch, waits for parameters and gradients included.

    Args:
        micro: the worker's step without sharding, with all parameters of its part of the model.
        depth: number of blocks, each of which is gathered separately.
        cluster: the machines.
        mesh: says over how many workers the model is sharded; if over one, `micro` is returned.

    >>> from allstep.plan.nodes import Link
    >>> link = Link(bandwidth_bps=8e9)
    >>> two = Cluster(name="two", num_nodes=2, workers_per_node=1, intra=link, inter=link)
    >>> micro = Workload(num_params=100_000_000, forward_s=0.1, backward_s=1.0)
    >>> found = sharded_step(micro, 4, two, MeshSpec(data=2, shard=2))  # 0.22 s a gather
    >>> round(found.forward_s, 2), round(found.backward_s, 2)
    (0.26, 1.04)
    """
    if mesh.shard == 1:
        return micro
    whole, sum_s = _messages(micro, micro.num_params, cluster, mesh)
    gather_s, end_s = whole.seconds / 2, whole.seconds / 2 / (depth + 1)
    return replace(
        micro,
        forward_s=_beside(micro.forward_s, gather_s, whole) + end_s,
        backward_s=_beside(micro.backward_s, 2 * gather_s + sum_s, whole) + end_s,
        optimizer_s=micro.optimizer_s / mesh.shard,
    )


def sharded_waits(
    micro: Workload, num_params: int, cluster: Cluster, mesh: MeshSpec
) -> tuple[float, float]:
    """Seconds for which a worker of a pipeline waits in a micro-batch, forward and backward.

    Args:
        micro: a micro-batch's step on one worker, undivided.
        num_params: parameters of the worker's stages.
        cluster: the machines.
        mesh: says over how many workers its stages are sharded.
    """
    if mesh.shard == 1:
        return 0.0, 0.0
    whole, sum_s = _messages(micro, num_params, cluster, mesh)
    return whole.seconds / 2, whole.seconds + sum_s


def _messages(
    micro: Workload, num_params: int, cluster: Cluster, mesh: MeshSpec
) -> tuple[BucketCost, float]:
    """The cost of an all-reduce of parameters over the shards, and seconds of one over copies."""
    shard_axis, copies = mesh.shard_axes(cluster)
    whole = _all_reduce(shard_axis, micro, num_params)
    return whole, _all_reduce(copies, micro, num_params // mesh.shard).seconds


def _all_reduce(axis: Cluster, micro: Workload, num_elements: int) -> BucketCost:
    return bucket_cost(
        "fp32", "native", axis, num_elements, micro.core_share, element_bytes=micro.element_bytes
    )


def _beside(compute_s: float, wire_s: float, cost: BucketCost) -> float:
    """Seconds until compute and communication have ended, which slow each other down."""
    both_s = min(compute_s, wire_s)
    return max(
        compute_s + cost.compute_slowdown * both_s, wire_s + cost.communication_slowdown * both_s
    )
