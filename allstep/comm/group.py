"""A worker's place, and what algorithms, shared memory and comparisons need of a group.

`WorkerGroup` is a part of a communicator's interface, so that they need not import communicators.
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
    """This rank's place: its node, and its number among the workers there."""

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int

    @classmethod
    def from_nodes(cls, nodes: Sequence[Hashable], rank: int) -> "Topology":
        """Derives the place from each rank's node id, such as a host name.

        >>> Topology.from_nodes(["a", "a", "b"], 1)
        Topology(local_rank=1, local_size=2, node_rank=0, num_nodes=2)
        >>> Topology.from_nodes(["a", "b", "a"], 2)
        Topology(local_rank=1, local_size=2, node_rank=0, num_nodes=2)
        """
        own = nodes[rank]
        order = list(dict.fromkeys(nodes))
        return cls(nodes[:rank].count(own), nodes.count(own), order.index(own), len(order))


class Dependent(Protocol):
    """An object that must be aborted with a communicator."""

    def abort(self) -> None:
        """Makes ranks that wait for this one fail fast."""


class MessageGroup(Protocol):
    """Workers that can send each other messages.

    Attributes:
        wire: sends and receives raw tensors.
        messages: sends and receives bytes of any length.
        announced: the calls that workers announce to each other.
    """

    rank: int
    size: int
    wire: Wire
    messages: Messages
    announced: AnnouncedCalls


class WorkerGroup(MessageGroup, Protocol):
    """One worker's handle of a group of workers; a `Communicator` is one."""

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
        """Divides the workers into groups, as MPI_Comm_split does."""

    def add_dependent(self, dependent: Dependent) -> None:
        """Registers an object that is aborted with this group."""

    def close(self) -> None:
        """Leaves the group."""

    def abort(self) -> None:
        """Leaves the group so that ranks that wait for this one fail fast."""
