"""Messages of any length between ranks that don't know beforehand what they will receive.

[Note: header] A message starts with a header of fixed size: the verb that sent it, the length of
its body, and the body's beginning. Only a body that does not fit takes a second message.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from allstep.comm.wire import Wire
from allstep.comm.work import JoinedWork, Work
from allstep.errors import DisagreementError

_HEADER_BYTES = 256
_PREFIX_BYTES = 9  # one byte for the verb, eight for the body's length
_INLINE_BYTES = _HEADER_BYTES - _PREFIX_BYTES
_REST_TAG = (1 << 30) + 1  # beyond the tags that users may choose
_VERBS = (
    "agree",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object",
    "gather",
    "gather_object",
    "reduce_scatter",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "split",
)
_COMPARES = 0x80  # flag next to the verb: the message is a comparison of arguments


class Messages:
    """Sends and receives byte strings over a wire; see [Note: header]."""

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self.device = device  # the device that messages are sent from

    def broadcast(self, body: bytes | None, root: int, verb: str) -> bytes:
        """The root's body, on every rank."""
        if self._wire.rank != root:
            return self._take(lambda part: self._wire.broadcast(part, root, verb), verb, root)
        body = body or b""
        for part in (self._seal(body, _VERBS.index(verb)), self._rest(body)):
            self._wire.broadcast(part, root, verb).wait()
        return body

    def all_gather(self, body: bytes, verb: str, *, compares: bool = False) -> list[bytes]:
        """Every rank's body, on every rank; `compares` marks a comparison of arguments."""
        size, code = self._wire.size, _VERBS.index(verb) | (_COMPARES if compares else 0)
        headers = self._wire.all_gather(self._seal(body, code), [_HEADER_BYTES] * size, verb)
        opened = [self._open(header, code, rank) for rank, header in enumerate(headers)]
        sizes_bytes = [num_bytes - len(start) for num_bytes, start in opened]
        if not any(sizes_bytes):
            return [start for _, start in opened]
        rests = self._wire.all_gather(self._rest(body), sizes_bytes, verb)
        return [start + _to_bytes(rest) for (_, start), rest in zip(opened, rests, strict=True)]

    def all_to_all(self, bodies: Sequence[bytes], verb: str) -> list[bytes]:
        """Sends one body to each rank and returns the one received from each."""
        size = self._wire.size
        code = _VERBS.index(verb)
        sealed = [self._seal(body, code) for body in bodies]
        headers = self._wire.all_to_all(sealed, [_HEADER_BYTES] * size, verb)
        opened = [self._open(header, code, rank) for rank, header in enumerate(headers)]
        rests = [self._empty(num_bytes - len(start)) for num_bytes, start in opened]
        # Both at once: if a send waits for its receiver, two ranks that send first wait forever.
        posted = [
            self._wire.exchange(self._rest(bodies[rank]), rank, rests[rank], rank, _REST_TAG, verb)
            for rank in range(size)
            if rank != self._wire.rank
        ]
        rests[self._wire.rank] = self._rest(bodies[self._wire.rank])
        for call in posted:
            call.wait()
        return [start + _to_bytes(rest) for (_, start), rest in zip(opened, rests, strict=True)]

    def send(self, body: bytes, dest: int, tag: int, verb: str) -> Work[None]:
        """Starts sending a body to another rank."""
        parts = (self._seal(body, _VERBS.index(verb)), self._rest(body))
        posted = [self._wire.send(part, dest, tag, verb) for part in parts]
        return JoinedWork(posted, lambda: None)

    def recv(self, source: int, tag: int, verb: str, sent_by: str) -> bytes:
        """Waits for a body that another rank sends by the verb `sent_by`."""
        return self._take(lambda part: self._wire.recv(part, source, tag, verb), sent_by, source)

    def _take(self, post: Callable[[Tensor], Work[None]], sent_by: str, source: int) -> bytes:
        """Receives a body; `post` is called for its header, then for its rest."""
        header = self._empty(_HEADER_BYTES)
        post(header).wait()
        num_bytes, start = self._open(header, _VERBS.index(sent_by), source)
        rest = self._empty(num_bytes - len(start))
        post(rest).wait()
        return start + _to_bytes(rest)

    def _seal(self, body: bytes, code: int) -> Tensor:
        """The header for a body."""
        prefix = bytes([code]) + len(body).to_bytes(8, "little")
        return self._to_tensor((prefix + body[:_INLINE_BYTES]).ljust(_HEADER_BYTES, b"\0"))

    def _open(self, header: Tensor, code: int, source: int) -> tuple[int, bytes]:
        """The length of the whole body and its beginning."""
        data = _to_bytes(header)
        num_bytes = int.from_bytes(data[1:_PREFIX_BYTES], "little")
        if data[0] != code:
            names = self._wire.names
            raise DisagreementError(
                f"{names.named(self._wire.rank)} expected {_named(code)} where "
                f"{names.named(source)} called {_named(data[0])}; call the same verbs in "
                "the same order on all ranks."
            )
        return num_bytes, data[_PREFIX_BYTES:][:num_bytes]

    def _rest(self, body: bytes) -> Tensor:
        return self._to_tensor(body[_INLINE_BYTES:])

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _to_tensor(self, data: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).to(self.device)


def _named(code: int) -> str:
    verb = code & ~_COMPARES
    if verb >= len(_VERBS):
        return "something else"
    return f"the comparison of `{_VERBS[verb]}`" if code & _COMPARES else f"`{_VERBS[verb]}`"


def _to_bytes(buffer: Tensor) -> bytes:
    return buffer.cpu().numpy().tobytes()
