"""Where a worker is, and what algorithms, shared memory and comparisons need of its peers.

`WorkerGroup` is less than a communicator, which is one: so those need not know communicators.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from allstep.comm.announced import AnnouncedCalls
from allstep.comm.messages import Messages
from allstep.comm.wire import Wire


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


class Dependent(Protocol):
    """What must not go on when a communicator is aborted."""

    def abort(self) -> None:
        """Lets ranks who wait for this one fail fast."""


class MessageGroup(Protocol):
    """Workers who can tell each other something.

    Attributes:
        wire: raw tensors to and from other ranks.
        messages: bytes of any length to and from other ranks.
        announced: the calls that workers tell each other of.
    """

    rank: int
    size: int
    wire: Wire
    messages: Messages
    announced: AnnouncedCalls


class WorkerGroup(MessageGroup, Protocol):
    """One worker's end of a group of workers; see `Communicator`, which is one."""

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    timeout_s: float

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, on all ranks."""

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """The root's object, on all ranks."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def split(self, color: int | None, key: int = 0) -> "WorkerGroup | None":
        """Divides the workers into groups."""

    def add_dependent(self, dependent: Dependent) -> None:
        """Aborts it too when this group is aborted."""

    def close(self) -> None:
        """Leaves the group."""

    def abort(self) -> None:
        """Leaves the group so that ranks who wait for this one fail fast."""
