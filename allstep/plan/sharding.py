"""What FSDP2 makes of a step of a model whose states it shards over some workers.

[Note: sharded step] FSDP2 takes each of the model's `depth` blocks for itself, and the rest
together. In each micro-batch it gathers all parameters once forward and once backward, and sums
gradients so that each worker keeps its shard of the sum: three times G seconds, of half an
all-reduce of the parameters each. Where the shards have copies (HSDP), their sum over these takes
R seconds more. All of it travels beside compute but for the first part that is gathered and the
last that is summed, so that a micro-batch of f + b seconds takes

    forward     max(f, G) + G / (depth + 1)
    backward    max(b, 2 G + R) + G / (depth + 1)

where compute and communication are slower beside each other as with any exchange. Nothing is left
to exchange at the step's end. Each worker updates its shard.

The stages of a pipeline are sharded each for itself, so that nothing travels beside compute: a
worker waits G seconds forward and 2 G + R backward in each micro-batch, of its own parameters.

Source: Zhao et al., 2023, arXiv:2304.11277.
"""

from dataclasses import replace

from allstep.plan.cluster import Cluster
from allstep.plan.cost import BucketCost, bucket_cost
from allstep.plan.mesh import MeshSpec
from allstep.plan.workload import Workload


def sharded_step(micro: Workload, depth: int, cluster: Cluster, mesh: MeshSpec) -> Workload:
    """A micro-batch's step of a worker, waits for parameters and gradients included.

    Args:
        micro: of the worker, with all parameters of its part of the model.
        depth: blocks, each of which is gathered for itself.
        cluster: the machines.
        mesh: says over how many workers it is sharded; over one it stays as it is.

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
        micro: an undivided micro-batch's step.
        num_params: of the worker.
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
    """An all-reduce of so many parameters over the shards, and the seconds of one over copies."""
    shard_axis, copies = mesh.shard_axes(cluster)
    whole = _all_reduce(shard_axis, micro, num_params)
    return whole, _all_reduce(copies, micro, num_params // mesh.shard).seconds


def _all_reduce(axis: Cluster, micro: Workload, num_elements: int) -> BucketCost:
    return bucket_cost(
        "fp32", "native", axis, num_elements, micro.core_share, element_bytes=micro.element_bytes
    )


def _beside(compute_s: float, wire_s: float, cost: BucketCost) -> float:
    """Seconds until both have ended, which slow each other down while both go on."""
    both_s = min(compute_s, wire_s)
    return max(
        compute_s + cost.compute_slowdown * both_s, wire_s + cost.communication_slowdown * both_s
    )
