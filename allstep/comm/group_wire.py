"""The wire of a process group of torch's; the only file that calls one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from allstep.comm.failures import is_timeout, translated
from allstep.comm.roll_call import call_roll
from allstep.comm.roster import Roster
from allstep.comm.work import BackendWork, Work
from allstep.errors import CollectiveTimeoutError, PeerLostError, UsageError

__all__ = ["GroupWire"]

_CHUNK_BYTES = 1 << 30  # backends count the bytes of a message in 32 bits here and there
_SWAP_TAG = (1 << 31) - 2
_ABORT_TAG = (1 << 31) - 1

_Start = Callable[[dist.ProcessGroup], dist.Work]


class GroupWire:
    """The wire of a process group of torch's; see `Wire` for the verbs."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_s: float,
        close: Callable[[], None] = lambda: None,
        roster: Roster | None = None,
    ) -> None:
        self.group: dist.ProcessGroup | None = group
        self.rank = group.rank()
        self.size = group.size()
        self.timeout_s = timeout_s
        self._close = close
        self.roster = roster or Roster.of(group)
        self._device_types = {
            device.type
            for device in group._device_types
            if device.type == "cpu" or group._get_backend(device).name() != "gloo"
        }

    def transport_device(self, device: torch.device) -> torch.device:
        if device.type in self._device_types:
            return device
        if device.type == "cuda" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def _post(
        self,
        verb: str,
        starts: Sequence[_Start],
        timeout_s: float | None = None,
        *,
        meets: bool = False,
    ) -> Work[None]:
        """Starts calls.

        Args:
            verb: names them in errors.
            starts: what starts them.
            timeout_s: of messages; without it they end after the timeout of their own options.
            meets: whether a wait for them ends only when all ranks have come.
        """
        group = self.group
        if group is None:
            raise UsageError(
                f"`{verb}` was called on a closed communicator; call it before `close()`."
            )
        with self._explained(verb, None):
            works = [start(group) for start in starts]

        def note_meeting() -> None:
            if meets:
                self.roster.last_met = verb

        name = f"`{verb}` on {self.roster.own}"
        explained = partial(self._explained, verb)
        return BackendWork(works, explained, name, note_meeting, timeout_s)

    @contextmanager
    def _explained(self, verb: str, timeout_s: float | None) -> Iterator[None]:
        """Typed errors for what fails inside; after the group's own timeout with a roll call."""
        try:
            number, size = self.roster.number, self.roster.size
            with translated(verb, number, size, timeout_s or self.timeout_s):
                yield
        except PeerLostError:
            self.roster.leave_word(verb)
            raise
        except CollectiveTimeoutError as error:
            if timeout_s is not None and timeout_s < self.timeout_s:
                raise  # the caller may wait again
            roll = call_roll(self.roster, verb)
            raise CollectiveTimeoutError(f"{error} {roll}".rstrip()) from error.__cause__

    def _options(self, kind: type[Any]) -> Any:
        options = kind()
        options.timeout = timedelta(seconds=self.timeout_s)
        return options

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, verb: str) -> Work[None]:
        options = self._options(dist.AllreduceOptions)
        options.reduceOp = op
        starts: list[_Start] = [lambda group: group.allreduce([tensor], options)]
        return self._post(verb, starts, meets=not tensor.is_cuda)

    def reduce_scatter(
        self, parts: Sequence[Tensor], op: dist.ReduceOp.RedOpType, verb: str
    ) -> tuple[Tensor, Work[None]]:
        if len({part.numel() for part in parts}) == 1:
            options = self._options(dist.ReduceScatterOptions)
            options.reduceOp = op
            joined = torch.cat([part.reshape(-1) for part in parts])
            output = torch.empty_like(parts[self.rank], memory_format=torch.contiguous_format)
            flat = output.reshape(-1)
            starts: list[_Start] = [lambda group: group._reduce_scatter_base(flat, joined, options)]
            return output, self._post(verb, starts, meets=not flat.is_cuda)
        own = [part.clone(memory_format=torch.contiguous_format) for part in parts]

        def reduce_to(root: int) -> _Start:
            options = self._options(dist.ReduceOptions)
            options.reduceOp = op
            options.rootRank = root
            return lambda group: group.reduce([own[root]], options)

        starts = [reduce_to(root) for root in range(self.size)]
        return own[self.rank], self._post(verb, starts, meets=not own[0].is_cuda)

    def _broadcasts(self, buffer: Tensor, root: int) -> list[_Start]:
        options = self._options(dist.BroadcastOptions)
        options.rootRank = root
        options.rootTensor = 0

        def of(chunk: Tensor) -> _Start:
            return lambda group: group.broadcast([chunk], options)

        return [of(chunk) for chunk in _chunks(buffer)]

    def broadcast(self, buffer: Tensor, root: int, verb: str) -> Work[None]:
        return self._post(verb, self._broadcasts(buffer, root))

    def all_gather(self, buffer: Tensor, sizes_bytes: Sequence[int], verb: str) -> list[Tensor]:
        output = torch.empty(sum(sizes_bytes), dtype=torch.uint8, device=buffer.device)
        pieces = list(torch.split(output, list(sizes_bytes)))
        if buffer.device.type == "cpu":
            self._swap([buffer.contiguous()] * self.size, pieces, verb)
        elif len(set(sizes_bytes)) == 1 and output.numel() <= _CHUNK_BYTES:
            base = buffer.contiguous()
            options = self._options(AllgatherOptions)
            self._post(verb, [lambda group: group._allgather_base(output, base, options)]).wait()
        else:
            pieces[self.rank].copy_(buffer)
            starts = [
                start
                for root, piece in enumerate(pieces)
                for start in self._broadcasts(piece, root)
            ]
            self._post(verb, starts).wait()
        return pieces

    def all_to_all(
        self, buffers: Sequence[Tensor], sizes_bytes: Sequence[int], verb: str
    ) -> list[Tensor]:
        device = buffers[0].device
        output = torch.empty(sum(sizes_bytes), dtype=torch.uint8, device=device)
        pieces = list(torch.split(output, list(sizes_bytes)))
        if device.type == "cpu":
            self._swap([buffer.contiguous() for buffer in buffers], pieces, verb)
            return pieces
        options = self._options(dist.AllToAllOptions)
        joined = torch.cat(list(buffers))
        sent_bytes = [buffer.numel() for buffer in buffers]
        self._post(
            verb,
            [
                lambda group: group.alltoall_base(
                    output, joined, list(sizes_bytes), sent_bytes, options
                )
            ],
        ).wait()
        return pieces

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], verb: str) -> None:
        """Sends to and receives from all at once; Gloo's own collectives take turns, which on a
        slow link takes up to twice as long.
        """
        incoming[self.rank].copy_(outgoing[self.rank])
        starts: list[_Start] = []
        for distance in range(1, self.size):
            source, dest = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            starts += _recvs(incoming[source], source, _SWAP_TAG)
            starts += _sends(outgoing[dest], dest, _SWAP_TAG)
        self._post(verb, starts, self.timeout_s, meets=True).wait()

    def send(self, buffer: Tensor, dest: int, tag: int, verb: str) -> Work[None]:
        return self._post(verb, _sends(buffer, dest, tag), self._limit_s(buffer))

    def recv(self, buffer: Tensor, source: int, tag: int, verb: str) -> Work[None]:
        return self._post(verb, _recvs(buffer, source, tag), self._limit_s(buffer))

    def exchange(
        self, outgoing: Tensor, dest: int, incoming: Tensor, source: int, tag: int, verb: str
    ) -> Work[None]:
        starts = [*_recvs(incoming, source, tag), *_sends(outgoing, dest, tag)]
        if incoming.device.type == "cpu":
            return self._post(verb, starts, self._limit_s(incoming))

        def together(group: dist.ProcessGroup) -> dist.Work:
            """One after the other NCCL would wait for ever: each for a peer that does the same."""
            group._start_coalescing(incoming.device)
            for start in starts:
                start(group)
            return group._end_coalescing(incoming.device)

        return self._post(verb, [together] if starts else [])

    def _limit_s(self, buffer: Tensor) -> float | None:
        """Gloo takes the timeout of a send or receive at its wait; NCCL's wait would block."""
        return self.timeout_s if buffer.device.type == "cpu" else None

    def close(self, *, abort: bool) -> None:
        group, self.group = self.group, None
        if group is None:
            return
        if abort:
            if "cpu" in self._device_types:
                _break_connections(group)
            with suppress(RuntimeError):
                group.abort()
        self._close()


def _sends(buffer: Tensor, dest: int, tag: int) -> list[_Start]:
    def of(chunk: Tensor) -> _Start:
        return lambda group: group.send([chunk], dest, tag)

    return [of(chunk) for chunk in _chunks(buffer)]


def _recvs(buffer: Tensor, source: int, tag: int) -> list[_Start]:
    def of(chunk: Tensor) -> _Start:
        return lambda group: group.recv([chunk], source, tag)

    return [of(chunk) for chunk in _chunks(buffer)]


def _chunks(buffer: Tensor) -> list[Tensor]:
    """Pieces that any backend can send; none if there is nothing to send."""
    return list(torch.split(buffer, _CHUNK_BYTES)) if buffer.numel() else []


def _break_connections(group: dist.ProcessGroup) -> None:
    """Closes a group's connections, so that its other ranks fail at once.

    Gloo closes them itself when nobody holds the group any more, which cannot be known here. So
    let a call time out: the first that does closes all; on one that is closed already a call
    fails for that reason.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if is_timeout(error):
                break
