"""Point-to-point messages whose shapes both sides know, so that no header is sent."""

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from allstep.comm.base import PRIVATE_TAG
from allstep.comm.communicator import Communicator
from allstep.comm.layout import bytes_of
from allstep.comm.shared_memory import Mailboxes, NotShared
from allstep.comm.work import CompletedWork, JoinedWork, Work
from allstep.device import is_accelerator

_TAG = PRIVATE_TAG + 16


class BatchedSendRecv:
    """Messages between workers: through shared memory within a host, otherwise over the wire.

    Args:
        comm: the workers. The first exchange is collective: all workers must make it.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._mailboxes: Mailboxes | None = None
        self._has_met = False

    def _meet(self) -> Mailboxes | None:
        """Makes the mailboxes; None if workers can't share memory. Collective."""
        comm = self._comm
        if comm.size == 1 or comm.num_nodes > 1 or is_accelerator(comm.device):
            return None
        if len(set(comm.all_gather_object(os.getpid()))) < comm.size:
            return None
        try:
            mailboxes = Mailboxes.create(comm)
        except NotShared as reason:
            reason.tell(comm.rank, "messages use the network, not shared memory")
            return None
        comm.add_dependent(mailboxes)
        return mailboxes

    def exchange(
        self,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Sequence[int]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        verb: str,
    ) -> Work[dict[int, Tensor]]:
        """Posts one send to each of some ranks and one receive from each of some, all at once.

        The ranks must agree on who sends what to whom: otherwise they get garbage or a typed
        error.

        Args:
            outgoing: rank -> tensor to send there; other ranks only.
            incoming: rank -> shape of the tensor that it sends; other ranks only.
            dtype: dtype of all tensors.
            device: the device on which received tensors are returned.
            verb: name of the call, for errors.

        Returns:
            A Work of rank -> tensor received from it.
        """
        rooms = {
            peer: torch.empty(
                tuple(shape), dtype=dtype, device=self._comm.wire.transport_device(device)
            )
            for peer, shape in incoming.items()
        }
        if not self._has_met:  # even if this rank sends nothing: the meeting is collective
            self._mailboxes, self._has_met = self._meet(), True
        posted = []
        for peer in sorted(outgoing.keys() | rooms.keys()):
            # The lower rank's message goes first: NCCL runs a pair's calls in the order made.
            for is_send in (self._comm.rank < peer, self._comm.rank > peer):
                if is_send and peer in outgoing:
                    posted.append(self._send(outgoing[peer], peer, verb))
                if not is_send and peer in rooms:
                    posted.append(self._receive(rooms[peer], peer, verb))

        return JoinedWork(posted, lambda: {peer: room.to(device) for peer, room in rooms.items()})

    def _send(self, x: Tensor, peer: int, verb: str) -> Work[None]:
        mailboxes = self._mailboxes_for(x)
        if mailboxes is not None:
            mailboxes.post(x.detach(), peer, verb)
            return CompletedWork(None)
        sent = bytes_of(x).to(self._comm.wire.transport_device(x.device))
        return self._comm.wire.send(sent, peer, _TAG, verb)

    def _receive(self, room: Tensor, peer: int, verb: str) -> Work[None]:
        mailboxes = self._mailboxes_for(room)
        if mailboxes is None:
            return self._comm.wire.recv(room.view(-1).view(torch.uint8), peer, _TAG, verb)
        return mailboxes.expect(room, peer, verb)

    def _mailboxes_for(self, x: Tensor) -> Mailboxes | None:
        """The mailboxes if a tensor fits; both sides of a message decide the same."""
        mailboxes = self._mailboxes
        if mailboxes is None or is_accelerator(x.device) or x.nbytes > mailboxes.message_bytes:
            return None
        return mailboxes
