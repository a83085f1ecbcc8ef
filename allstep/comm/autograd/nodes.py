"""The one node of the graph that all these calls make, and the checks of their arguments."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.comm.communicator import Communicator
from allstep.comm.layout import dtype_name
from allstep.errors import CommunicationError, UsageError

Gradients = tuple[Tensor | None, ...]
"""Of the delegate and of the inputs."""


def is_differentiable(x: Tensor) -> bool:
    """Can a tensor of this dtype have a gradient?"""
    return x.is_floating_point() or x.is_complex()


def check_differentiable(name: str, x: object, verb: str) -> None:
    """Raises UsageError unless `x` is a tensor that can have a gradient."""
    if not isinstance(x, Tensor):
        raise UsageError(f"`{name}` is a {type(x).__name__}; pass a tensor to `{verb}`.")
    if not is_differentiable(x):
        raise UsageError(
            f"`{name}` is {dtype_name(x.dtype)}, which has no gradient; use `comm.{verb}`."
        )


def mirrored(
    comm: Communicator,
    call: str,
    forward: Callable[..., Sequence[Tensor]],
    backward: Callable[..., Gradients],
    xs: Sequence[Tensor],
    delegate: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Makes a node of a call; see [Note: mirrored calls].

    Args:
        comm: the workers.
        call: names it in the errors of its backward.
        forward: (delegate, *xs) -> outputs.
        backward: (*gradients of the outputs) -> gradients of the delegate and of `xs`; holds no
            tensor, so that none lives longer than it must.
        xs: the inputs.
        delegate: what this call shall come after; None for a leaf in its place, which brings the
            node into the graph.

    Raises:
        UsageError: if `delegate` is not the zero that `send` and others return.
    """
    if delegate is None:
        delegate = torch.zeros((), device=comm.device, requires_grad=True)
    elif not isinstance(delegate, Tensor) or delegate.dim() or not is_differentiable(delegate):
        raise UsageError(
            f"`delegate` (={shown(delegate)}) must be a floating-point tensor without dims, such "
            "as `send` returns."
        )

    def named_backward(*grads: Tensor) -> Gradients:
        with _in_backward(comm, call):
            return backward(*grads)

    outputs: tuple[Tensor, ...] = _Mirrored.apply(forward, named_backward, delegate, *xs)  # type: ignore[no-untyped-call]
    return outputs


class _Mirrored(Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Sequence[Tensor]],
        backward: Callable[..., Gradients],
        delegate: Tensor,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.mirror = backward
        # To autograd no views: what follows may change them in place.
        outputs = tuple(y.data for y in forward(delegate, *xs))
        ctx.mark_non_differentiable(*(y for y in outputs if not is_differentiable(y)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        return None, None, *ctx.mirror(*grads)


def shown(x: object) -> str:
    """A delegate, for errors: a tensor by its shape."""
    return repr(list(x.shape) if isinstance(x, Tensor) else x)


@contextmanager
def _in_backward(comm: Communicator, call: str) -> Iterator[None]:
    """Adds to the errors of communication inside in whose backward they happened."""
    try:
        yield
    except CommunicationError as error:
        raise type(error)(
            f"{error} This was the backward of `{call}` on rank {comm.rank}: every rank that took "
            "part in it must run `backward` through it, in the reversed order of the calls; "
            "`pseudo_connect` brings in what the loss does not depend on."
        ) from error
