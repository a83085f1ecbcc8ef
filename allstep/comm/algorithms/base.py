"""The base of all-reduce algorithms, and the counted messages that most of them send."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from allstep.comm.group import WorkerGroup
from allstep.comm.work import Work

_TAG = (1 << 30) + 2  # above the tags that users may choose


class AllReduce(ABC):
    """An algorithm that sums a tensor over the ranks of a communicator.

    The order of the additions depends only on the numbers of ranks and of elements, so a sum is
    reproducible; and each element's sum is computed once and sent on, so that all ranks hold the
    same bits.

    Args:
        comm: the workers; all of them must make the algorithm.

    Attributes:
        name: name in `ALGORITHMS`.
        comm: the workers.
    """

    name: ClassVar[str]

    def __init__(self, comm: WorkerGroup) -> None:
        self.comm = comm
        self._messenger = Messenger(comm)
        self._names = comm.wire.names
        comm.add_dependent(self)

    @property
    def _parts(self) -> Iterable["AllReduce"]:
        """The algorithms that this one uses."""
        return ()

    def reduce_(self, flat: Tensor) -> None:
        """flat = sum over ranks r of flat_r, in place. Collective, blocking.

        Args:
            flat: [n], contiguous, of equal n and dtype on every rank.

        Raises:
            CollectiveTimeoutError: if it took longer than the communicator's `timeout_s`.
            PeerLostError: if another rank failed.
        """
        assert flat.dim() == 1 and flat.is_contiguous()
        if self.comm.size == 1 or not flat.numel():
            return
        # torch calls a single element contiguous whatever its stride is, but `view` does not.
        flat = flat.detach().as_strided(flat.shape, (1,))
        on_wire = flat.to(self.comm.wire.transport_device(flat.device))
        try:
            self._reduce_(on_wire)
        except BaseException:
            self.abort()
            raise
        if on_wire is not flat:
            flat.copy_(on_wire)
        self._note_meeting()

    @abstractmethod
    def _reduce_(self, flat: Tensor) -> None:
        """`reduce_` for at least two ranks and one element, on a device that the wire can use."""

    def _note_meeting(self) -> None:
        """Records in the ranks' names that all ranks have taken part in a sum."""
        self._names.last_call = "all_reduce"

    def used_for(self, num_bytes: int) -> "AllReduce":
        """The algorithm that sums a tensor of that size."""
        return self

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that this rank has sent so far."""
        return self._messenger.sent_bytes + sum(part.sent_bytes for part in self._parts)

    @property
    def num_messages(self) -> int:
        """Number of messages that this rank has sent so far."""
        return self._messenger.num_messages + sum(part.num_messages for part in self._parts)

    def state_dict(self) -> dict[str, Any]:
        """The choices, apart from ranks and elements, that determine the order of the additions."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most have none)
        """Restores the order of the additions that `state_dict` described. Collective.

        Args:
            state: the same state on every rank; it may be another algorithm's.
        """

    def close(self) -> None:
        """Frees what the algorithm holds; the communicator stays open."""
        for part in self._parts:
            part.close()

    def abort(self) -> None:
        """Leaves at once, so that ranks that wait for this one fail fast."""
        for part in self._parts:
            part.abort()
        self.close()


class Messenger:
    """Sends messages whose sizes both ends know, and counts them at the sender."""

    def __init__(self, comm: WorkerGroup) -> None:
        self._wire = comm.wire
        self.sent_bytes = 0
        self.num_messages = 0

    def send(self, x: Tensor, dest: int) -> Work[None]:
        """Starts sending a contiguous flat tensor to another rank."""
        self.count(x.nbytes)
        return self._wire.send(x.view(torch.uint8), dest, _TAG, "all_reduce")

    def recv(self, x: Tensor, source: int) -> Work[None]:
        """Starts receiving a tensor from another rank."""
        return self._wire.recv(x.view(torch.uint8), source, _TAG, "all_reduce")

    def exchange(self, outgoing: Tensor, dest: int, incoming: Tensor, source: int) -> None:
        """Sends and receives at once, and waits for both."""
        self.count(outgoing.nbytes)
        self._wire.exchange(
            outgoing.view(torch.uint8), dest, incoming.view(torch.uint8), source, _TAG, "all_reduce"
        ).wait()

    def count(self, sent_bytes: int, num_messages: int = 1) -> None:
        """Counts messages; empty ones are not sent."""
        if sent_bytes:
            self.sent_bytes += sent_bytes
            self.num_messages += num_messages
