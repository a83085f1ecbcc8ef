"""Point-to-point messages whose shapes both sides know: no word about them travels."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from allstep.comm.communicator import Communicator
from allstep.comm.layout import bytes_of
from allstep.comm.member import PRIVATE_TAG
from allstep.comm.pending import Pending

__all__ = ["exchange_parcels"]

_TAG = PRIVATE_TAG + 16


def exchange_parcels(
    comm: Communicator,
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Sequence[int]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    verb: str,
) -> Pending[dict[int, Tensor]]:
    """Posts one message to each of some ranks and one from each of some, all at once.

    The ranks must agree on who sends what to whom: otherwise they get garbage or a typed error.

    Args:
        comm: the workers; those that have no part in it need not call this.
        outgoing: rank -> what it gets; not this rank.
        incoming: rank -> shape of what it sends; not this rank.
        dtype: of all of them.
        device: where what comes shall be.
        verb: names the call in errors.

    Returns:
        A Pending of rank -> what came from there.
    """
    carrier = comm._wire.carrier(device)
    sent = {peer: bytes_of(x).to(carrier) for peer, x in outgoing.items()}
    rooms = {
        peer: torch.empty(tuple(shape), dtype=dtype, device=carrier)
        for peer, shape in incoming.items()
    }
    posted = []
    for peer in sorted(sent.keys() | rooms.keys()):
        # The lower rank's message goes first: NCCL serves a pair's calls in their order.
        for is_send in (comm.rank < peer, comm.rank > peer):
            if is_send and peer in sent:
                posted.append(comm._wire.send(sent[peer], peer, _TAG, verb))
            if not is_send and peer in rooms:
                posted.append(comm._wire.recv(_flat_bytes(rooms[peer]), peer, _TAG, verb))

    def finish(timeout_s: float | None) -> dict[int, Tensor]:
        for call in posted:
            call.wait(timeout_s)
        sent.clear()
        return {peer: room.to(device) for peer, room in rooms.items()}

    return Pending(finish)


def _flat_bytes(room: Tensor) -> Tensor:
    return room.view(-1).view(torch.uint8)
