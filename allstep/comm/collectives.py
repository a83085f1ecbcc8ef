"""The collectives that move tensors.

Shapes, dtypes and structure are sent with the values, except in `all_gather_into_tensor` and
`all_to_all_single`, for which all ranks know them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from allstep.comm.base import PRIVATE_TAG, CommunicatorBase
from allstep.comm.group import Topology
from allstep.comm.layout import Layout, Tensors, as_tuple, bytes_of
from allstep.comm.reduce_ops import check_apart
from allstep.comm.wire import Wire
from allstep.comm.work import JoinedWork, Work
from allstep.device import (
    Event,
    current_stream,
    has_streams,
    lend_to_current_stream,
    new_stream,
)
from allstep.errors import DisagreementError, UsageError, check_type

X = TypeVar("X", Tensor, Sequence[Tensor], Tensor | Sequence[Tensor])


class TensorCollectives(CommunicatorBase):
    """Moves tensors and tuples of tensors, whose layouts may differ between ranks."""

    def become(self, wire: Wire, topology: Topology) -> None:
        super().become(wire, topology)
        self._transport_device = wire.transport_device(self.device)

    def all_gather(self, x: Tensor | Sequence[Tensor], *, check: bool = False) -> tuple[Any, ...]:
        """Every rank's `x`, on all ranks.

        Args:
            x: tensor or tuple of tensors; shapes, dtypes and structure may differ between ranks.
            check: whether the ranks first compare which verb they call; the same on all.

        Returns:
            One entry per rank, on `x`'s device.
        """
        layout = Layout.of(x)
        if check:
            self._compare("all_gather")
        headers = self.messages.all_gather(layout.encode(), "all_gather")
        layouts = [Layout.decode(header) for header in headers]
        sizes_bytes = [other.num_bytes for other in layouts]
        buffers = self.wire.all_gather(
            layout.pack(x, self._transport_device), sizes_bytes, "all_gather"
        )
        device = _device_of(x, self.device)
        return _unpack_all(layouts, buffers, device)

    def all_to_all(
        self, xs: Sequence[Tensor | Sequence[Tensor]], *, check: bool = False
    ) -> tuple[Any, ...]:
        """Sends `xs[r]` to rank r and returns what each rank sent here.

        Args:
            xs: `size` tensors or tuples of tensors of any shapes and dtypes.
            check: whether the ranks first compare which verb they call; the same on all.

        Returns:
            One entry per rank, on the device of `xs`.
        """
        xs = self._check_one_per_rank("xs", xs)
        own = [Layout.of(x, "xs") for x in xs]
        if check:
            self._compare("all_to_all")
        headers = self.messages.all_to_all([layout.encode() for layout in own], "all_to_all")
        layouts = [Layout.decode(header) for header in headers]
        packed = [layout.pack(x, self._transport_device) for layout, x in zip(own, xs, strict=True)]
        sizes_bytes = [layout.num_bytes for layout in layouts]
        buffers = self.wire.all_to_all(packed, sizes_bytes, "all_to_all")
        return _unpack_all(layouts, buffers, _device_of(xs[0], self.device))

    def gather(
        self, x: Tensor | Sequence[Tensor], root: int = 0, *, check: bool = False
    ) -> tuple[Any, ...] | None:
        """Every rank's `x`, on the root only.

        Args:
            x: tensor or tuple of tensors; shapes, dtypes and structure may differ between ranks.
            root: the rank that receives them.
            check: whether the ranks first compare which verb and root they want; the same on all.

        Returns:
            On the root one entry per rank, on `x`'s device; None elsewhere.
        """
        self._check_rank("root", root)
        if check:
            self._compare("gather", f"to rank {root}", "`root`")
        if self.rank != root:
            self._send(x, root, PRIVATE_TAG, "gather").wait()
            return None
        received = {
            rank: self._recv(rank, PRIVATE_TAG, "gather", "gather") for rank in self._others
        }
        received[root] = _own_copy(x)
        device = _device_of(x, self.device)
        return tuple(_to(received[rank], device) for rank in range(self.size))

    def scatter(
        self,
        xs: Sequence[Tensor | Sequence[Tensor]] | None = None,
        root: int = 0,
        *,
        check: bool = False,
    ) -> Any:
        """Gives each rank its entry of the root's `xs`.

        Args:
            xs: on the root `size` tensors or tuples of tensors of any shapes and dtypes; None
                elsewhere.
            root: the rank that sends them.
            check: whether the ranks first compare which verb and root they want; the same on all.

        Returns:
            This rank's entry, on the communicator's device.
        """
        self._check_rank("root", root)
        if check:
            self._compare("scatter", f"from rank {root}", "`root`")
        if self.rank != root:
            return _to(self._recv(root, PRIVATE_TAG, "scatter", "scatter"), self.device)
        xs = self._check_one_per_rank("xs", xs)
        for x in xs:
            Layout.of(x, "xs")  # raises before anything is sent
        posted = [self._send(xs[rank], rank, PRIVATE_TAG, "scatter") for rank in self._others]
        for call in posted:
            call.wait()
        return _to(_own_copy(xs[root]), self.device)

    @overload
    def broadcast(self, x: X, root: int = ..., *, check: bool = ...) -> X: ...
    @overload
    def broadcast(self, x: None = ..., root: int = ..., *, check: bool = ...) -> Any: ...
    def broadcast(self, x: Any = None, root: int = 0, *, check: bool = False) -> Any:
        """The root's tensors, on all ranks.

        Args:
            x: on the root the tensors to send; elsewhere tensors of the same shapes and dtypes,
                which are filled in place, or None for new ones.
            root: the rank that sends.
            check: whether the ranks first compare their call and root, and whether the root's
                tensors fit; the same on all.

        Returns:
            `x` if it was given, else new tensors on the communicator's device.

        Raises:
            DisagreementError: if a given `x` does not fit what the root sent; with `check` on
                every rank.
        """
        self._check_rank("root", root)
        own = None if x is None else Layout.of(x)
        if self.rank == root and own is None:
            raise UsageError("`x` is None on the root of `broadcast`; pass what it shall send.")
        if self.rank != root and own is not None:
            check_apart(as_tuple(x), "broadcast")
        if check:
            self._compare("broadcast", f"from rank {root}", "`root`")
        header = own.encode() if own is not None and self.rank == root else None
        layout = Layout.decode(self.messages.broadcast(header, root, "broadcast"))
        if check:
            self._compare("broadcast", f"of {own or layout}", "shapes and dtypes")
        if self.rank == root:
            self.wire.broadcast(layout.pack(x, self._transport_device), root, "broadcast").wait()
            return x
        buffer = layout.empty_buffer(self._transport_device)
        self.wire.broadcast(buffer, root, "broadcast").wait()
        if own is None:
            return _to(layout.unpack(buffer), self.device)
        if own != layout:  # raised only now, so that the other ranks are not left waiting
            raise DisagreementError(
                f"`broadcast`: {self._named(self.rank)} gave {own} to fill, the root "
                f"({self._named(root)}) sent {layout}; pass equal shapes and dtypes, or None."
            )
        for tensor, value in zip(as_tuple(x), as_tuple(layout.unpack(buffer)), strict=True):
            tensor.detach().copy_(value)
        return x

    def all_gather_into_tensor(self, x: Tensor, *, check: bool = False) -> Tensor:
        """Every rank's tensor, stacked; a single message, whereas `all_gather` sends shapes first.

        Ranks that pass different shapes or dtypes get garbage or a PeerLostError, or Gloo ends
        their process: use it only if shapes are known to be equal, or pass `check`.

        Args:
            x: [*shape], of the same shape and dtype on every rank.
            check: whether the ranks first compare verb, shape and dtype; the same on all.

        Returns:
            [size, *shape]; row r is rank r's tensor.

        >>> from allstep.comm import Communicator
        >>> Communicator.single_process().all_gather_into_tensor(torch.ones(2))
        tensor([[1., 1.]])
        """
        _check_tensor(x, "all_gather")
        if check:
            self._compare("all_gather_into_tensor", _spec(x), "shapes and dtypes")
        raw = bytes_of(x).to(self.wire.transport_device(x.device))
        parts = self.wire.all_gather(raw, [raw.numel()] * self.size, "all_gather_into_tensor")
        return _rows(parts, x, (self.size, *x.shape))

    def all_to_all_single(self, x: Tensor, *, check: bool = False) -> Tensor:
        """Sends row r of every rank's tensor to rank r; see `all_gather_into_tensor`.

        Args:
            x: [size, *shape], of the same shape and dtype on every rank.
            check: as in `all_gather_into_tensor`.

        Returns:
            [size, *shape]; row r came from rank r.

        Raises:
            UsageError: if `x` does not have `size` rows.
        """
        _check_tensor(x, "all_to_all")
        if not x.dim() or x.shape[0] != self.size:
            raise UsageError(f"`x` has shape {list(x.shape)}; pass {self.size} rows, one a rank.")
        if check:
            self._compare("all_to_all_single", _spec(x), "shapes and dtypes")
        raw = bytes_of(x).to(self.wire.transport_device(x.device)).chunk(self.size)
        if not x.numel():
            return x.clone()
        sizes_bytes = [piece.numel() for piece in raw]
        return _rows(self.wire.all_to_all(raw, sizes_bytes, "all_to_all_single"), x, x.shape)

    @overload
    def send(
        self,
        x: Tensor | Sequence[Tensor],
        dest: int,
        tag: int = ...,
        *,
        async_op: Literal[False] = ...,
    ) -> None: ...
    @overload
    def send(
        self, x: Tensor | Sequence[Tensor], dest: int, tag: int = ..., *, async_op: Literal[True]
    ) -> Work[None]: ...
    def send(
        self, x: Tensor | Sequence[Tensor], dest: int, tag: int = 0, *, async_op: bool = False
    ) -> Work[None] | None:
        """Sends tensors to another rank, which calls `recv`.

        Args:
            x: tensor or tuple of tensors of any shapes and dtypes.
            dest: the rank that receives; not this one.
            tag: distinguishes messages to the same rank (on CUDA only their order does).
            async_op: return a Work at once; it must be waited for, and `x` not changed before.
        """
        self._check_peer("dest", dest, tag)
        work = self._send(x, dest, tag, "send")
        return work if async_op else work.wait()

    @overload
    def recv(self, source: int, tag: int = ..., *, async_op: Literal[False] = ...) -> Any: ...
    @overload
    def recv(self, source: int, tag: int = ..., *, async_op: Literal[True]) -> Work[Any]: ...
    def recv(self, source: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Receives what another rank sends by `send`.

        Args:
            source: the rank that sends; not this one.
            tag: as in `send`.
            async_op: return a Work at once. With NCCL a pair's messages are sent in order, whatever
                their tags, and a group's calls share one stream: make calls in an order in which no
                rank waits for a later one.

        Returns:
            A tensor or a tuple of tensors, as sent, on the communicator's device.
        """
        self._check_peer("source", source, tag)

        def receive() -> Tensors:
            return _to(self._recv(source, tag, "recv", "send"), self.device)

        if async_op:
            own = self._inbox.start(source, tag, partial(_in_own_stream, receive, self.device))
            return JoinedWork([own], lambda: _hand_over(*own.wait()))
        return self._inbox.receive(source, tag, receive)

    def _send(self, x: Tensor | Sequence[Tensor], dest: int, tag: int, verb: str) -> Work[None]:
        layout = Layout.of(x)
        header = self.messages.send(layout.encode(), dest, tag, verb)
        body = self.wire.send(layout.pack(x, self._transport_device), dest, tag, verb)
        return JoinedWork([header, body], lambda: None)

    def _recv(self, source: int, tag: int, verb: str, sent_by: str) -> Tensors:
        layout = Layout.decode(self.messages.recv(source, tag, verb, sent_by))
        buffer = layout.empty_buffer(self._transport_device)
        self.wire.recv(buffer, source, tag, verb).wait()
        return layout.unpack(buffer)


def _unpack_all(
    layouts: Sequence[Layout], buffers: Sequence[Tensor], device: torch.device
) -> tuple[Tensors, ...]:
    pairs = zip(layouts, buffers, strict=True)
    return tuple(_to(layout.unpack(buffer), device) for layout, buffer in pairs)


def _device_of(x: Tensor | Sequence[Tensor], default: torch.device) -> torch.device:
    tensors = as_tuple(x)
    return tensors[0].device if tensors else default


def _to(x: Tensors, device: torch.device) -> Tensors:
    return x.to(device) if isinstance(x, Tensor) else tuple(tensor.to(device) for tensor in x)


def _in_own_stream(
    receive: Callable[[], Tensors], device: torch.device
) -> tuple[Tensors, Event | None]:
    """Receives in a thread; also returns the event after which an accelerator has the tensors.

    The current stream of a new thread is the device's default stream: on that stream the message
    would delay everything that the program launches meanwhile.
    """
    if not has_streams(device):
        return receive(), None
    with new_stream(device) as stream:
        return receive(), stream.record_event()


def _hand_over(x: Tensors, event: Event | None) -> Tensors:
    """Passes tensors that another stream has received to the current stream."""
    for tensor in as_tuple(x):
        if event is not None:
            current_stream(tensor.device).wait_event(event)
            lend_to_current_stream(tensor)
    return x


def _own_copy(x: Tensor | Sequence[Tensor]) -> Tensors:
    if isinstance(x, Tensor):
        return x.detach().clone()
    return tuple(tensor.detach().clone() for tensor in x)


def _check_tensor(x: object, verb: str) -> None:
    check_type("x", x, Tensor, f"several travel by `{verb}`")
    Layout.of(x)  # type: ignore[arg-type]


def _spec(x: Tensor) -> str:
    return f"of {Layout.of(x)} on {x.device.type}"


def _rows(parts: list[Tensor], x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Adjacent pieces of bytes as one tensor of `x`'s dtype, on its device."""
    return torch.cat(parts).to(x.device).view(x.dtype).view(shape)
