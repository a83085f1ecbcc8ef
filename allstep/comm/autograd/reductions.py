"""Reductions over the ranks and the way back of their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.comm.autograd.movements import all_gather
from allstep.comm.autograd.nodes import anchor, check_differentiable, in_backward
from allstep.comm.communicator import Communicator
from allstep.comm.layout import as_tuple
from allstep.comm.reduce_ops import ReduceOp
from allstep.errors import UsageError

__all__ = ["all_reduce", "reduce_scatter"]


def all_reduce(comm: Communicator, x: Tensor, op: ReduceOp = "sum") -> Tensor:
    """Reduces over the ranks; unlike the communicator's verb it leaves `x` as it is.

    The backward of "sum" and "mean" is the same reduction of the gradients. That of "max" and
    "min" gives the gradients' sum to the ranks that have the extreme value, in equal parts.

    Args:
        comm: the workers.
        x: floating-point tensor of equal shape and dtype on every rank.
        op: "sum", "mean", "max" or "min".

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> all_reduce(Communicator.single_process(), x).sum().backward()
    >>> x.grad
    tensor([1., 1.])
    """
    check_differentiable("x", x, "all_reduce")
    reduced: Tensor = _AllReduce.apply(comm, op, anchor(comm, None), x)  # type: ignore[no-untyped-call]
    return reduced


def reduce_scatter(
    comm: Communicator, x: Tensor | Sequence[Tensor], op: ReduceOp = "sum"
) -> Tensor:
    """Reduces over the ranks and leaves each of them its part; backward is `all_gather`.

    Args:
        comm: the workers.
        x: floating-point tensor whose dim 0 is a multiple of `size`, or a tuple of `size`
            tensors, one for each rank; equal shapes and dtypes on every rank.
        op: "sum" or "mean".

    Raises:
        UsageError: if `x` cannot be divided, or `op` is "max" or "min".
    """
    if op in ("max", "min"):
        raise UsageError(
            f"`op` (={op!r}) has no mirrored call; use `all_reduce` and keep this rank's part."
        )
    for part in as_tuple(x):
        check_differentiable("x", part, "reduce_scatter")
    is_whole = isinstance(x, Tensor)
    y: Tensor = _ReduceScatter.apply(comm, op, is_whole, anchor(comm, None), *as_tuple(x))  # type: ignore[no-untyped-call]
    return y


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, op: ReduceOp, leaf: Tensor, x: Tensor) -> Tensor:
        reduced = comm.all_reduce(x.clone(), op)
        ctx.comm, ctx.op = comm, op
        if op in ("max", "min"):
            ctx.save_for_backward(x == reduced)
        return reduced

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, Tensor]:
        (grad,) = grads
        with in_backward(ctx.comm, f"all_reduce(op={ctx.op!r})"):
            if not ctx.saved_tensors:
                return None, None, None, all_reduce(ctx.comm, grad, ctx.op)
            has_it = ctx.saved_tensors[0].to(grad.dtype)
            share = has_it / ctx.comm.all_reduce(has_it.clone())
            return None, None, None, share * all_reduce(ctx.comm, grad)


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Communicator, op: ReduceOp, is_whole: bool, leaf: Tensor, *xs: Tensor
    ) -> Tensor:
        ctx.comm, ctx.op, ctx.is_whole = comm, op, is_whole
        return comm.reduce_scatter(xs[0] if is_whole else xs, op)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0] / ctx.comm.size if ctx.op == "mean" else grads[0]
        with in_backward(ctx.comm, f"reduce_scatter(op={ctx.op!r})"):
            gathered = all_gather(ctx.comm, grad)
        parts = (torch.cat(gathered),) if ctx.is_whole else gathered
        return None, None, None, None, *parts
