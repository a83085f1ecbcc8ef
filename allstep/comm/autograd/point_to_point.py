"""From one rank to another and, in backward, back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.comm.autograd.nodes import anchor, in_backward, is_differentiable, unshared
from allstep.comm.communicator import Communicator
from allstep.comm.layout import as_tuple
from allstep.errors import UsageError

__all__ = ["pseudo_connect", "recv", "send"]


@dataclass
class _Message:
    """Between which ranks a message goes, and whether it is a tuple."""

    comm: Communicator
    peer: int
    tag: int
    is_tuple: bool = True


def send(
    comm: Communicator,
    x: Tensor | Sequence[Tensor],
    dest: int,
    tag: int = 0,
    *,
    delegate: Tensor | None = None,
) -> Tensor:
    """Sends tensors to another rank, which calls `recv`; see [Note: mirrored calls].

    Args:
        comm: the workers.
        x: tensor or tuple of tensors of any shapes and dtypes.
        dest: the rank that receives; not this one.
        tag: tells messages to the same rank apart.
        delegate: what this call shall come after; its backward comes after that of this call.

    Returns:
        A delegate: a zero without dims whose backward receives x's gradient.
    """
    xs = as_tuple(x)
    message = _Message(comm, dest, tag, not isinstance(x, Tensor))
    sent: Tensor = _Send.apply(message, anchor(comm, delegate), *xs)  # type: ignore[no-untyped-call]
    return sent


def recv(comm: Communicator, source: int, tag: int = 0, *, delegate: Tensor | None = None) -> Any:
    """Receives what another rank sends by `send`; see [Note: mirrored calls].

    Args:
        comm: the workers.
        source: the rank that sends; not this one.
        tag: as in `send`.
        delegate: what this call shall come after; its backward comes after that of this call.

    Returns:
        A tensor or a tuple of tensors, as sent, on the communicator's device; backward sends
        their gradients to `source`, zeros where nothing depends on them.
    """
    message = _Message(comm, source, tag)
    received: tuple[Tensor, ...] = _Recv.apply(message, anchor(comm, delegate))  # type: ignore[no-untyped-call]
    return received if message.is_tuple else received[0]


def pseudo_connect(delegate: Tensor, *actual: Tensor) -> Any:
    """The actual tensors, whose backward also runs the delegate's.

    Args:
        delegate: what `send` returned, or `gather` away from its root.
        actual: the tensors that the loss depends on.

    Returns:
        A tensor equal to `actual`, or a tuple if there are several.

    >>> x = torch.ones(2, requires_grad=True)
    >>> delegate = torch.zeros((), requires_grad=True)
    >>> pseudo_connect(delegate, 3 * x).sum().backward()
    >>> delegate.grad, x.grad
    (tensor(0.), tensor([3., 3.]))
    """
    if not actual:
        raise UsageError("`actual` is empty; pass the tensors that the loss depends on.")
    if not isinstance(delegate, Tensor) or delegate.dim():
        shown = list(delegate.shape) if isinstance(delegate, Tensor) else delegate
        raise UsageError(f"`delegate` (={shown!r}) must be a tensor without dims, as of `send`.")
    connected: tuple[Tensor, ...] = _Connect.apply(delegate, *actual)  # type: ignore[no-untyped-call]
    return connected if len(actual) > 1 else connected[0]


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, message: _Message, delegate: Tensor, *xs: Tensor) -> Tensor:
        ctx.message = message
        ctx.devices = [x.device if is_differentiable(x) else None for x in xs]
        message.comm.send(xs if message.is_tuple else xs[0], message.peer, message.tag)
        return torch.zeros((), dtype=delegate.dtype, device=delegate.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        message = ctx.message
        if not any(ctx.devices):
            return None, grads[0], *ctx.devices
        with in_backward(message.comm, f"send(dest={message.peer}, tag={message.tag})"):
            received = recv(message.comm, message.peer, message.tag, delegate=grads[0])
        left = iter(received)
        gradients = [None if device is None else next(left).to(device) for device in ctx.devices]
        return None, torch.zeros_like(grads[0]), *gradients


class _Recv(Function):
    @staticmethod
    def forward(ctx: Any, message: _Message, delegate: Tensor) -> tuple[Tensor, ...]:
        received = message.comm.recv(message.peer, message.tag)
        message.is_tuple = not isinstance(received, Tensor)
        xs = tuple(unshared(x) for x in as_tuple(received))
        ctx.message = message
        ctx.differentiable = [is_differentiable(x) for x in xs]
        ctx.mark_non_differentiable(*(x for x in xs if not is_differentiable(x)))
        return xs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        message = ctx.message
        own = tuple(grad for grad, kept in zip(grads, ctx.differentiable, strict=True) if kept)
        with in_backward(message.comm, f"recv(source={message.peer}, tag={message.tag})"):
            return None, send(message.comm, own, message.peer, message.tag)


class _Connect(Function):
    @staticmethod
    def forward(ctx: Any, delegate: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(delegate)
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        zero: Tensor = _ZeroAfter.apply(*ctx.saved_tensors, *grads)  # type: ignore[no-untyped-call]
        return zero, *grads


class _ZeroAfter(Function):
    """A zero that depends on other tensors in the graph alone, for `_Connect` to be mirrored."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *xs: Tensor) -> Tensor:
        ctx.num_inputs = 1 + len(xs)
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.num_inputs)
