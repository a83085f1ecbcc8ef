"""Messages from one rank to another whose gradients are sent back in backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.comm.autograd.nodes import Gradients, is_differentiable, mirrored, shown
from allstep.comm.communicator import Communicator
from allstep.comm.layout import as_tuple
from allstep.errors import UsageError


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
        tag: distinguishes messages to the same rank.
        delegate: result of a call that this one must follow; in backward this call's gradient comes
            first.

    Returns:
        A delegate: a zero without dimensions whose backward receives x's gradient.
    """
    xs, is_tuple = as_tuple(x), not isinstance(x, Tensor)
    devices = [x.device if is_differentiable(x) else None for x in xs]

    def forward(leaf: Tensor, *xs: Tensor) -> tuple[Tensor]:
        comm.send(xs if is_tuple else xs[0], dest, tag)
        return (torch.zeros_like(leaf),)

    def backward(grad: Tensor) -> Gradients:
        if not any(devices):
            return grad, *(None for _ in devices)
        left = iter(recv(comm, dest, tag, delegate=grad))
        gradients = [None if device is None else next(left).to(device) for device in devices]
        return torch.zeros_like(grad), *gradients

    return mirrored(comm, f"send(dest={dest}, tag={tag})", forward, backward, xs, delegate)[0]


def recv(comm: Communicator, source: int, tag: int = 0, *, delegate: Tensor | None = None) -> Any:
    """Receives what another rank sends by `send`; see [Note: mirrored calls].

    Args:
        comm: the workers.
        source: the rank that sends; not this one.
        tag: as in `send`.
        delegate: result of a call that this one must follow; in backward this call's gradient comes
            first.

    Returns:
        A tensor or a tuple of tensors, as sent, on the communicator's device; backward sends
        their gradients to `source`, and zeros if nothing depends on them.
    """
    kept: list[bool] = []
    is_tuple = True

    def forward(leaf: Tensor) -> tuple[Tensor, ...]:
        nonlocal is_tuple
        received = comm.recv(source, tag)
        is_tuple = not isinstance(received, Tensor)
        kept.extend(map(is_differentiable, as_tuple(received)))
        return as_tuple(received)

    def backward(*grads: Tensor) -> Gradients:
        own = tuple(g for g, has_grad in zip(grads, kept, strict=True) if has_grad)
        return (send(comm, own, source, tag),)

    got = mirrored(comm, f"recv(source={source}, tag={tag})", forward, backward, (), delegate)
    return got if is_tuple else got[0]


def pseudo_connect(delegate: Tensor, *actual: Tensor) -> Any:
    """Returns `actual`, with a backward that also runs the delegate's.

    Args:
        delegate: result of `send`, or of `gather` away from its root.
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
        raise UsageError(
            f"`delegate` (={shown(delegate)}) must be a tensor without dims, such as "
            "`send` returns."
        )
    connected: tuple[Tensor, ...] = _Connect.apply(delegate, *actual)  # type: ignore[no-untyped-call]
    return connected if len(actual) > 1 else connected[0]


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
    """A zero that depends on other tensors only in the graph; backward of `_Connect` needs it."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *xs: Tensor) -> Tensor:
        ctx.num_inputs = 1 + len(xs)
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.num_inputs)
