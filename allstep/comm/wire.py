"""The transport that a communicator needs: it sends and receives raw tensors.

It knows nothing of shapes, structures or objects.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from allstep.comm.activity import Activity
from allstep.comm.missing import RankNames
from allstep.comm.work import CompletedWork, Work


class Wire(Protocol):
    """Makes calls between ranks and waits for them; `verb` names the call in errors."""

    rank: int
    size: int
    timeout_s: float
    group: dist.ProcessGroup | None
    names: RankNames

    def transport_device(self, device: torch.device) -> torch.device:
        """The device that a tensor on `device` must be on to be sent."""

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, verb: str) -> Work[None]:
        """Reduces a contiguous tensor in place."""

    def reduce_scatter(
        self, parts: Sequence[Tensor], op: dist.ReduceOp.RedOpType, verb: str
    ) -> tuple[Tensor, Work[None]]:
        """Reduces `size` tensors, one per rank, and returns this rank's."""

    def broadcast(self, buffer: Tensor, root: int, verb: str) -> Work[None]:
        """Fills every rank's buffer with the root's."""

    def all_gather(self, buffer: Tensor, sizes_bytes: Sequence[int], verb: str) -> list[Tensor]:
        """Every rank's bytes, whose sizes are known beforehand."""

    def all_to_all(
        self, buffers: Sequence[Tensor], sizes_bytes: Sequence[int], verb: str
    ) -> list[Tensor]:
        """Sends one buffer to each rank and returns those received, whose sizes are known."""

    def send(self, buffer: Tensor, dest: int, tag: int, verb: str) -> Work[None]:
        """Sends bytes to another rank."""

    def recv(self, buffer: Tensor, source: int, tag: int, verb: str) -> Work[None]:
        """Receives bytes from another rank."""

    def exchange(
        self, outgoing: Tensor, dest: int, incoming: Tensor, source: int, tag: int, verb: str
    ) -> Work[None]:
        """Sends bytes to one rank and receives bytes from another, both at once."""

    def new_group_id(self) -> int:
        """A number that no group split off this one has yet; only one rank calls it."""

    def split(self, name: str, ranks: Sequence[int], device: torch.device) -> "Wire":
        """The wire of a group of some ranks, in the given order; all of these ranks call it.

        Args:
            name: the group's name; no other group of these ranks has it.
            ranks: the ranks, including this one.
            device: the device that they compute on.
        """

    def check(self, verb: str) -> None:
        """Raises PeerLostError if the connection to another rank is known to be closed."""

    def interrupt(self) -> None:
        """Makes waiting calls fail, here and on the other ranks; from any thread."""

    def close(self, *, abort: bool) -> None:
        """Leaves the group; with `abort` so that peers that are in a call fail at once."""


class SingleProcessWire:
    """The wire of a single worker."""

    rank = 0
    size = 1
    group: dist.ProcessGroup | None = None

    def __init__(self, timeout_s: float, activity: Activity | None = None) -> None:
        self.timeout_s = timeout_s
        self.names = RankNames([0], 0, 1, activity=activity)

    def transport_device(self, device: torch.device) -> torch.device:
        return device

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, verb: str) -> Work[None]:
        return CompletedWork(None)

    def reduce_scatter(
        self, parts: Sequence[Tensor], op: dist.ReduceOp.RedOpType, verb: str
    ) -> tuple[Tensor, Work[None]]:
        return parts[0].clone(), CompletedWork(None)

    def broadcast(self, buffer: Tensor, root: int, verb: str) -> Work[None]:
        return CompletedWork(None)

    def all_gather(self, buffer: Tensor, sizes_bytes: Sequence[int], verb: str) -> list[Tensor]:
        return [buffer.clone()]

    def all_to_all(
        self, buffers: Sequence[Tensor], sizes_bytes: Sequence[int], verb: str
    ) -> list[Tensor]:
        return [buffers[0].clone()]

    def send(self, buffer: Tensor, dest: int, tag: int, verb: str) -> Work[None]:
        raise AssertionError("a single process has nobody to send to")

    def recv(self, buffer: Tensor, source: int, tag: int, verb: str) -> Work[None]:
        raise AssertionError("a single process has nobody to receive from")

    def exchange(
        self, outgoing: Tensor, dest: int, incoming: Tensor, source: int, tag: int, verb: str
    ) -> Work[None]:
        raise AssertionError("a single process has nobody to exchange with")

    def new_group_id(self) -> int:
        return 0

    def split(self, name: str, ranks: Sequence[int], device: torch.device) -> "SingleProcessWire":
        return SingleProcessWire(self.timeout_s)

    def check(self, verb: str) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def close(self, *, abort: bool) -> None:
        pass
