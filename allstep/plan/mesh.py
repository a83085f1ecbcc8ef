"""A mesh of data x tensor: how many workers share a copy of the model, and over which links."""

from dataclasses import dataclass, replace

from allstep.errors import UsageError, check_integer
from allstep.plan.cluster import Cluster
from allstep.plan.nodes import Link


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """The lengths of the axes; the workers of a copy are neighbours, as in `comm.mesh`.

    Args:
        data: copies of the model, which share out the samples.
        tensor: workers of each copy, which have a part of every divided layer.

    Raises:
        UsageError: if a length is less than 1.

    >>> str(MeshSpec(data=4, tensor=2)), MeshSpec(data=4, tensor=2).num_workers
    ('data=4,tensor=2', 8)
    """

    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor"):
            check_integer(name, getattr(self, name))

    def __str__(self) -> str:
        return f"data={self.data},tensor={self.tensor}"

    @classmethod
    def all_of(cls, num_workers: int) -> "list[MeshSpec]":
        """Every mesh of so many workers, the least divided first.

        >>> print(*MeshSpec.all_of(6))
        data=6,tensor=1 data=3,tensor=2 data=2,tensor=3 data=1,tensor=6
        """
        lengths = (n for n in range(1, num_workers + 1) if num_workers % n == 0)
        return [cls(data=num_workers // tensor, tensor=tensor) for tensor in lengths]

    @property
    def num_workers(self) -> int:
        """Of all copies."""
        return self.data * self.tensor

    def tensor_axis(self, cluster: Cluster) -> Cluster:
        """The workers of one copy, as a cluster of their own.

        Args:
            cluster: of which the mesh takes the first workers, node by node.

        Raises:
            UsageError: if the cluster hasn't as many, or copies lie across nodes unevenly.
        """
        part = self._part(cluster)
        if self.data == 1:
            return part
        per_node = min(self.tensor, part.workers_per_node)
        return _axis(part, self.tensor, per_node, part.inter)

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
        if self.tensor == 1:
            return part
        num_parts = min(self.tensor, part.workers_per_node)
        inter = part.inter
        if inter is not None:
            inter = replace(inter, bandwidth_bps=inter.bandwidth_bps / num_parts)
        return _axis(part, self.data, max(1, part.workers_per_node // self.tensor), inter)

    def _part(self, cluster: Cluster) -> Cluster:
        part = cluster.of(self.num_workers, argument="mesh")
        tensor, per_node = self.tensor, part.workers_per_node
        if tensor % per_node and per_node % tensor:
            raise UsageError(
                f"`tensor` (={tensor}) must divide the {per_node} workers of a node, or be a"
                " multiple of them: else copies of the model lie across nodes unevenly."
            )
        return part


def _axis(cluster: Cluster, length: int, per_node: int, inter: Link | None) -> Cluster:
    return replace(
        cluster,
        num_nodes=length // per_node,
        workers_per_node=per_node,
        inter=inter,
        collectives=(),  # they were measured on all workers
    )
