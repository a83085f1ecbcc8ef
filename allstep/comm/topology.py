"""Which ranks share a node."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """This rank's place: on which node, and which of the workers there."""

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int

    @classmethod
    def from_nodes(cls, nodes: Sequence[Hashable], rank: int) -> "Topology":
        """Derives the place from what each rank calls its node, such as a host name.

        >>> Topology.from_nodes(["a", "a", "b"], 1)
        Topology(local_rank=1, local_size=2, node_rank=0, num_nodes=2)
        >>> Topology.from_nodes(["a", "b", "a"], 2)
        Topology(local_rank=1, local_size=2, node_rank=0, num_nodes=2)
        """
        own = nodes[rank]
        order = list(dict.fromkeys(nodes))
        return cls(nodes[:rank].count(own), nodes.count(own), order.index(own), len(order))
