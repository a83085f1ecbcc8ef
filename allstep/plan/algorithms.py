"""The all-reduce algorithms as sequences of phases, from which all their costs follow.

A phase says how many bytes the worker of a rank sends, exactly, and which critical path all workers
wait for: successive messages, the link on which they travel, how many workers share it, and how
many bytes the busiest worker adds up.
"""

from collections.abc import Mapping, Sequence

from allstep.plan.nodes import Nodes
from allstep.plan.phases import (
    AcrossNodes,
    NodeRing,
    NodeRoot,
    Pairs,
    Phase,
    Ring,
    SharedMemory,
    Traffic,
    Transfer,
)

ALGORITHMS: Mapping[str, tuple[Phase, ...]] = {
    "native": (Ring(),),  # the backend's is unknown; no algorithm sends fewer bytes than a ring
    "ring": (Ring(),),
    "halving_doubling": (Pairs(halves=True),),
    "recursive_doubling": (Pairs(halves=False),),
    "hierarchical": (NodeRoot(), AcrossNodes(from_all=False)),
    "two_dimensional": (NodeRing(), AcrossNodes(from_all=True)),
    "shared_memory": (SharedMemory(),),
    "dummy": (),
}


def traffic_of(
    phases: Sequence[Phase], nodes: Nodes, rank: int, num_elements: int, element_bytes: int
) -> Traffic:
    """The traffic of the worker of a rank in successive phases.

    Args:
        phases: the phases, such as a value of `ALGORITHMS`.
        nodes: the nodes; all their workers take part, with ranks counted node by node.
        rank: rank of the worker.
        num_elements: number of elements of the tensor.
        element_bytes: bytes of an element on the wire.

    >>> from allstep.plan.nodes import Link
    >>> four = Nodes(num_nodes=1, workers_per_node=4, intra=Link(bandwidth_bps=80e9))
    >>> traffic_of(ALGORITHMS["ring"], four, 0, 1000, 4)
    Traffic(sent_bytes=6000, num_messages=6)
    """
    if nodes.num_workers == 1 or not num_elements:
        return Traffic()
    sent = (phase.traffic(nodes, rank, num_elements, element_bytes) for phase in phases)
    return sum(sent, start=Traffic())


def path_of(phases: Sequence[Phase], nodes: Nodes, num_bytes: float) -> list[Transfer]:
    """The critical path of successive phases: the transfers that all workers wait for.

    >>> from allstep.plan.nodes import Link
    >>> eight = Nodes(num_nodes=1, workers_per_node=8, intra=Link(bandwidth_bps=80e9))
    >>> for name in ("ring", "hierarchical"):
    ...     print(name, sum(step.summed_bytes for step in path_of(ALGORITHMS[name], eight, 1.0)))
    ring 0.875
    hierarchical 7.0
    """
    if nodes.num_workers == 1:
        return []
    return [transfer for phase in phases for transfer in phase.path(nodes, num_bytes)]
