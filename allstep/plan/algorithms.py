"""What each all-reduce algorithm does: one row of phases for each, from which all costs follow.

A phase says what the worker of a rank sends, to the byte, and which path all workers wait for:
messages that follow one another, the link that they take, how many workers share it, and how many
bytes the busiest worker adds up.
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
    "native": (Ring(),),  # a backend's own is not known; no algorithm sends fewer bytes than a ring
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
    """What the worker of a rank sends in phases that follow one another.

    Args:
        phases: such as a row of `ALGORITHMS`.
        nodes: whose workers all take part, counted node by node.
        rank: of the worker.
        num_elements: of the tensor.
        element_bytes: bytes of each on the wire.

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
    """What all workers wait for in phases that follow one another.

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
