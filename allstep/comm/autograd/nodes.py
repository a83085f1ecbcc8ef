"""What the nodes of the graph share: the checks of their arguments, and errors that name them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from allstep.comm.communicator import Communicator
from allstep.comm.layout import dtype_name
from allstep.errors import CommunicationError, UsageError

__all__ = ["anchor", "check_differentiable", "in_backward", "is_differentiable", "unshared"]


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


def anchor(comm: Communicator, delegate: Tensor | None) -> Tensor:
    """The delegate, or in its place a leaf that brings a node into the graph.

    Raises:
        UsageError: if `delegate` is not the zero that `send` and others return.
    """
    if delegate is None:
        return torch.zeros((), device=comm.device, requires_grad=True)
    if not isinstance(delegate, Tensor) or delegate.dim() or not is_differentiable(delegate):
        shown = list(delegate.shape) if isinstance(delegate, Tensor) else delegate
        raise UsageError(
            f"`delegate` (={shown!r}) must be a floating-point tensor without dims, such as "
            "`send` returns."
        )
    return delegate


def unshared(x: Tensor) -> Tensor:
    """The same values, but to autograd no view: what follows may change them in place."""
    return x.data


@contextmanager
def in_backward(comm: Communicator, call: str) -> Iterator[None]:
    """Adds to the errors of communication inside in whose backward they happened."""
    try:
        yield
    except CommunicationError as error:
        raise type(error)(
            f"{error} This was the backward of `{call}` on rank {comm.rank}: every rank that took "
            "part in it must run `backward` through it, in the reversed order of the calls; "
            "`pseudo_connect` brings in what the loss does not depend on."
        ) from error
