"""The graph node that all these calls make, and the checks of their arguments."""

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
    """Whether a tensor of this dtype can have a gradient."""
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
    """Makes a call a node of the graph; see [Note: mirrored calls].

    Args:
        comm: the workers.
        call: name of the call, for errors in its backward.
        forward: (delegate, *xs) -> outputs.
        backward: (*gradients of the outputs) -> gradients of the delegate and of `xs`; must hold no
            tensors, so that they are freed early.
        xs: the inputs.
        delegate: result of a call that this one must follow; None for a new leaf, which makes the
            node require a gradient.

    Raises:
        UsageError: if `delegate` is not a zero such as `send` returns.
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
        # `.data`, so that autograd does not see views: users may change the outputs in place.
        outputs = tuple(y.data for y in forward(delegate, *xs))
        ctx.mark_non_differentiable(*(y for y in outputs if not is_differentiable(y)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        return None, None, *ctx.mirror(*grads)


def shown(x: object) -> str:
    """A delegate as errors show it: a tensor by its shape."""
    return repr(list(x.shape) if isinstance(x, Tensor) else x)


@contextmanager
def _in_backward(comm: Communicator, call: str) -> Iterator[None]:
    """Adds to communication errors inside the call in whose backward they happened."""
    try:
        yield
    except CommunicationError as error:
        raise type(error)(
            f"{error} This was the backward of `{call}` on rank {comm.rank}: every rank that took "
            "part in it must run `backward` through it, in the reversed order of the calls; "
            "`pseudo_connect` brings in what the loss does not depend on."
        ) from error
