"""What every verb needs: this worker's rank, its wire, and checks of arguments."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from allstep.comm.activity import Activity
from allstep.comm.agreement import agree
from allstep.comm.announced import AnnouncedCalls
from allstep.comm.group import Dependent, Topology
from allstep.comm.inbox import Inbox
from allstep.comm.messages import Messages
from allstep.comm.wire import Wire
from allstep.device import is_accelerator
from allstep.errors import UsageError

PRIVATE_TAG = 1 << 30  # for gather and scatter; users' tags are below


class CommunicatorBase:
    """One of the workers of a group; see `Communicator`."""

    def __init__(self, wire: Wire, topology: Topology, device: torch.device) -> None:
        self.device = device
        self.become(wire, topology)

    def become(self, wire: Wire, topology: Topology) -> None:
        """Makes this the communicator of a group; after `abort`, of another group.

        Whatever was made with the earlier group can't be used any more.

        Args:
            wire: the group's wire; that of another group must have the same activity.
            topology: this worker's place in the group.
        """
        self.rank = wire.rank
        self.size = wire.size
        self.local_rank = topology.local_rank
        self.local_size = topology.local_size
        self.node_rank = topology.node_rank
        self.num_nodes = topology.num_nodes
        self.timeout_s = wire.timeout_s
        self.wire = wire  # raw tensors to and from other ranks
        self._dependents: WeakValueDictionary[int, Dependent] = WeakValueDictionary()
        self.messages = Messages(wire, wire.transport_device(torch.device("cpu")))
        # An accelerator's backend has no tags: messages arrive in the order in which they are sent.
        has_tags = not is_accelerator(wire.transport_device(self.device))
        self._inbox = Inbox(wire.names, has_tags=has_tags)
        self.announced = AnnouncedCalls(wire)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The underlying process group of torch; None for a single process and after `close`."""
        return self.wire.group

    @property
    def activity(self) -> Activity:
        """What this worker is doing; shared by all groups split off from one."""
        return self.wire.names.activity

    def add_dependent(self, dependent: Dependent) -> None:
        """Registers an object, held weakly, that is aborted with this communicator."""
        self._dependents[id(dependent)] = dependent

    @property
    def _alive_dependents(self) -> list[Dependent]:
        """The dependents, in a new list: another thread may add one, or a last reference may go."""
        held = (reference() for reference in self._dependents.valuerefs())
        return [dependent for dependent in held if dependent is not None]

    def _compare(self, verb: str, wanted: str = "", equal: str = "arguments") -> None:
        """Raises DisagreementError on every rank unless all ranks want the same.

        Args:
            verb: name of the call, which must be the same on all ranks.
            wanted: the arguments with which this rank makes it, in words.
            equal: what errors call the arguments that must be equal on all ranks.
        """
        cure = f"Pass equal {equal} on all ranks."
        agree(self, f"`{verb}` {wanted}".rstrip(), verb=verb, cure=cure)

    def _named(self, rank: int) -> str:
        """A rank as errors call it. [Note: rank names]"""
        return self.wire.names.named(rank)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _check_rank(self, name: str, rank: int) -> None:
        if not _is_index(rank, self.size):
            raise UsageError(
                f"`{name}` (={rank!r}) is no rank; choose one of 0 to {self.size - 1}."
            )

    def _check_peer(self, name: str, rank: int, tag: int) -> None:
        self._check_rank(name, rank)
        if rank == self.rank:
            raise UsageError(
                f"`{name}` (={rank}) is this rank itself; keep the value instead of sending it."
            )
        if not _is_index(tag, PRIVATE_TAG):
            raise UsageError(
                f"`tag` (={tag!r}) is out of range; choose one of 0 to {PRIVATE_TAG - 1}."
            )

    def _check_one_per_rank(self, name: str, xs: Sequence[Any] | None) -> Sequence[Any]:
        if not isinstance(xs, (tuple, list)):
            raise UsageError(
                f"`{name}` is a {type(xs).__name__}; pass a tuple of {self.size}, one a rank."
            )
        if len(xs) != self.size:
            raise UsageError(f"`{name}` has {len(xs)} entries; pass {self.size}, one a rank.")
        return xs


def _is_index(value: object, stop: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < stop
