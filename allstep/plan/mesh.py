"""A mesh of data x pipeline x tensor, sharded or not: who shares a copy, and over which links."""

from dataclasses import dataclass, replace

from allstep.errors import UsageError, check_integer
from allstep.plan.cluster import Cluster
from allstep.plan.nodes import Link


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """The lengths of the axes; the workers of a copy are neighbours, as in `comm.mesh`.

    Args:
        data: copies of the model, which share out the samples.
        pipeline: workers of each copy, one after the other, which have some of the blocks.
        tensor: workers of each of these, neighbours, which have a part of every divided layer.
        shard: of `data`, workers over which FSDP2 shards parameters, gradients and the optimizer's
            states: all of them, or neighbours, which others have copies of.
        stages_per_worker: of a pipeline; above 1 its schedule is the interleaved one, else 1F1B.

    Raises:
        UsageError: if a length is less than 1, or `shard` doesn't go with the others.

    >>> str(MeshSpec(data=4, tensor=2)), MeshSpec(data=4, tensor=2).num_workers
    ('data=4,tensor=2', 8)
    >>> print(MeshSpec(data=2, pipeline=4, tensor=2), MeshSpec(data=8, shard=4))
    data=2,pipeline=4,tensor=2 data=8,tensor=1,shard=4
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    shard: int = 1
    stages_per_worker: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "pipeline", "tensor", "shard", "stages_per_worker"):
            check_integer(name, getattr(self, name))
        if self.data % self.shard:
            raise UsageError(f"`shard` (={self.shard}) must divide `data` (={self.data}).")

    def __str__(self) -> str:
        pipeline = f"pipeline={self.pipeline}," if self.pipeline > 1 else ""
        shard = f",shard={self.shard}" if self.shard > 1 else ""
        return f"data={self.data},{pipeline}tensor={self.tensor}{shard}"

    @classmethod
    def all_of(
        cls, num_workers: int, longest_pipeline: int = 1, stages_per_worker: int = 1
    ) -> "list[MeshSpec]":
        """Every mesh of so many workers, the least divided first.

        Each with several copies also sharded over all of `data`.

        >>> print(*MeshSpec.all_of(4))
        data=4,tensor=1 data=4,tensor=1,shard=4 data=2,tensor=2 data=2,tensor=2,shard=2
        data=1,tensor=4
        >>> print(*MeshSpec.all_of(3, longest_pipeline=3))
        data=3,tensor=1 data=3,tensor=1,shard=3 data=1,tensor=3 data=1,pipeline=3,tensor=1
        """
        whole = [
            cls(
                data=num_workers // size,
                pipeline=pipeline,
                tensor=size // pipeline,
                stages_per_worker=stages_per_worker if pipeline > 1 else 1,
            )
            for size in _divisors(num_workers)
            for pipeline in _divisors(size)
            if pipeline <= longest_pipeline
        ]
        return [
            mesh if shard == 1 else replace(mesh, shard=shard)
            for mesh in whole
            for shard in sorted({1, mesh.data})
        ]

    @property
    def num_workers(self) -> int:
        """Of all copies."""
        return self.data * self.copy_size

    @property
    def copy_size(self) -> int:
        """Workers that share a copy of the model."""
        return self.pipeline * self.tensor

    def tensor_axis(self, cluster: Cluster) -> Cluster:
        """The workers that share a copy's layers, as a cluster of their own.

        Args:
            cluster: of which the mesh takes the first workers, node by node.

        Raises:
            UsageError: if the cluster hasn't as many, or copies lie across nodes unevenly.
        """
        part = self._part(cluster)
        if self.tensor == part.num_workers:
            return part
        per_node = min(self.tensor, part.workers_per_node)
        return _axis(part, self.tensor, per_node, part.inter)

    def stage_link(self, cluster: Cluster) -> Link:
        """The slowest link between neighbours of a pipeline.

        Workers of a node that share layers send at the same time, over a share of its link each.

        Args:
            cluster: of which the mesh takes the first workers, node by node.

        Raises:
            UsageError: as `tensor_axis`.

        >>> node = Link(bandwidth_bps=80e9)
        >>> two = Cluster(name="two", num_nodes=2, workers_per_node=8, intra=node, inter=node)
        >>> MeshSpec(pipeline=4, tensor=4).stage_link(two).bandwidth_bps
        20000000000.0
        """
        part = self._part(cluster)
        if part.between is None or self.copy_size <= part.workers_per_node:
            return part.intra
        num_sharing = min(self.tensor, part.workers_per_node)
        return replace(part.between, bandwidth_bps=part.between.bandwidth_bps / num_sharing)

    def data_axis(self, cluster: Cluster) -> Cluster:
        """One worker of each copy, as a cluster: what exchanges gradients of the same part.

        Workers of a node that have other parts exchange theirs at the same time, over a share of
        the node's link each.

        Args:
            cluster: of which the mesh takes the first workers, node by node.

        Raises:
            UsageError: as `tensor_axis`.

        >>> node = Link(bandwidth_bps=80e9)
        >>> two = Cluster(name="two", num_nodes=2, workers_per_node=8, intra=node, inter=node)
        >>> axis = MeshSpec(data=4, tensor=4).data_axis(two)
        >>> axis.num_nodes, axis.workers_per_node, axis.inter.bandwidth_bps
        (2, 2, 20000000000.0)
        """
        part = self._part(cluster)
        if self.copy_size == 1:
            return part
        num_parts = min(self.copy_size, part.workers_per_node)
        inter = part.inter
        if inter is not None:
            inter = replace(inter, bandwidth_bps=inter.bandwidth_bps / num_parts)
        return _axis(part, self.data, max(1, part.workers_per_node // self.copy_size), inter)

    def shard_axes(self, cluster: Cluster) -> tuple[Cluster, Cluster]:
        """The workers that have the shards of one copy, and those that have the same shards.

        Args:
            cluster: of which the mesh takes the first workers, node by node.

        Raises:
            UsageError: as `tensor_axis`.
        """
        axis = self.data_axis(cluster)
        sharers = MeshSpec(data=self.data // self.shard, tensor=self.shard)
        return sharers.tensor_axis(axis), sharers.data_axis(axis)

    def _part(self, cluster: Cluster) -> Cluster:
        part = cluster.of(self.num_workers, argument="mesh")
        per_node = part.workers_per_node
        for name, size in (("tensor", self.tensor), ("pipeline x tensor", self.copy_size)):
            if size % per_node and per_node % size:
                raise UsageError(
                    f"`{name}` (={size}) must divide the {per_node} workers of a node, or be a"
                    " multiple of them: else copies of the model lie across nodes unevenly."
                )
        return part


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _axis(cluster: Cluster, length: int, per_node: int, inter: Link | None) -> Cluster:
    return replace(
        cluster,
        num_nodes=length // per_node,
        workers_per_node=per_node,
        inter=inter,
        collectives=(),  # they were measured on all workers
    )
