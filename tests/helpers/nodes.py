"""Nodes for the planner, as far as messages matter."""

from allstep.plan.nodes import Link, Nodes

_LINK = Link(bandwidth_bps=10e9)


def make_nodes(workers_per_node: int, num_nodes: int = 1, *, shares_memory: bool = False) -> Nodes:
    return Nodes(
        num_nodes=num_nodes,
        workers_per_node=workers_per_node,
        intra=_LINK,
        inter=_LINK,
        has_shared_memory=shares_memory,
    )
