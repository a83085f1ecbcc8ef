"""Meshes of data x pipeline x tensor, sharded or not, and the links between their workers."""

from dataclasses import dataclass, replace

from allstep.errors import UsageError, check_integer
from allstep.plan.cluster import Cluster
from allstep.plan.nodes import Link


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """The lengths of a mesh's axes; the workers of a copy have successive ranks, as in `comm.mesh`.

    Args:
        data: copies of the model, among which the samples are divided.
        pipeline: parts of a copy, one after the other, each with some of the blocks.
        tensor: workers of each part, with successive ranks, among which its layers are divided.
        shard: workers along `data` over which FSDP2 shards parameters, gradients and optimizer
            states: all of `data`, or groups of neighbours that hold copies of the same shards.
        stages_per_worker: stages of a pipeline on each worker; if more than 1, the schedule is
            interleaved, else 1F1B.

    Raises:
        UsageError: if a length is less than 1, or `shard` doesn't divide `data`.

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
        """Every mesh of `num_workers` workers, the least divided first.

        A mesh with several copies is listed twice: not sharded, and sharded over all of `data`.

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
        """Workers of all copies."""
        return self.data * self.copy_size

    @property
    def copy_size(self) -> int:
        """Workers that share a copy of the model."""
        return self.pipeline * self.tensor

    def tensor_axis(self, cluster: Cluster) -> Cluster:
        """The workers among which a layer is divided, as a cluster.

        Args:
            cluster: the cluster; the mesh uses its first workers, node by node.

        Raises:
            UsageError: if the cluster has fewer workers, or copies lie across nodes unevenly.
        """
        part = self._part(cluster)
        if self.tensor == part.num_workers:
            return part
        per_node = min(self.tensor, part.workers_per_node)
        return _axis(part, self.tensor, per_node, part.inter)

    def stage_link(self, cluster: Cluster) -> Link:
        """The slowest link between neighbours of a pipeline.

        Workers of a node that share layers send at the same time, so each gets a share of the
        node's link.

        Args:
            cluster: the cluster; the mesh uses its first workers, node by node.

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
        """The workers with the same part of each copy, as a cluster; they exchange gradients.

        A node's workers with other parts exchange theirs at the same time, so each gets a share of
        the node's link.

        Args:
            cluster: the cluster; the mesh uses its first workers, node by node.

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
        """The workers that have the shards of one copy, and those that have the same shard.

        Args:
            cluster: the cluster; the mesh uses its first workers, node by node.

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
