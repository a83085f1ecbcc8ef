"""What algorithms, shared memory and comparisons need of the workers: less than a communicator."""

from typing import Any, Protocol

import torch

from allstep.comm.messages import Messages
from allstep.comm.wire import Wire

__all__ = ["Dependent", "MessageGroup", "WorkerGroup"]


class Dependent(Protocol):
    """What must not go on when a communicator is aborted."""

    def abort(self) -> None:
        """Lets ranks who wait for this one fail fast."""


class MessageGroup(Protocol):
    """Workers who can tell each other something."""

    rank: int
    size: int

    @property
    def wire(self) -> Wire:
        """Raw tensors to and from other ranks."""

    @property
    def messages(self) -> Messages:
        """Bytes of any length to and from other ranks."""


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
