"""Reductions over the ranks whose gradients are sent back in backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from allstep.comm.autograd.collectives import all_gather
from allstep.comm.autograd.nodes import Gradients, check_differentiable, mirrored
from allstep.comm.communicator import Communicator
from allstep.comm.layout import as_tuple
from allstep.comm.reduce_ops import ReduceOp
from allstep.errors import UsageError


def all_reduce(comm: Communicator, x: Tensor, op: ReduceOp = "sum") -> Tensor:
    """Reduces over the ranks; unlike the communicator's verb it leaves `x` unchanged.

    The backward of "sum" and "mean" is the same reduction of the gradients. That of "max" and
    "min" divides the gradients' sum equally among the ranks that have the extreme value.

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
    has_extreme: list[Tensor] = []

    def forward(leaf: Tensor, x: Tensor) -> tuple[Tensor]:
        reduced = comm.all_reduce(x.clone(), op)
        if op in ("max", "min"):
            has_extreme.append(x == reduced)
        return (reduced,)

    def backward(grad: Tensor) -> Gradients:
        if not has_extreme:
            return None, all_reduce(comm, grad, op)
        share = has_extreme[0].to(grad.dtype)
        share = share / comm.all_reduce(share.clone())
        return None, share * all_reduce(comm, grad)

    return mirrored(comm, f"all_reduce(op={op!r})", forward, backward, (x,))[0]


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

    def forward(leaf: Tensor, *xs: Tensor) -> tuple[Tensor]:
        return (comm.reduce_scatter(xs[0] if is_whole else xs, op),)

    def backward(grad: Tensor) -> Gradients:
        gathered = all_gather(comm, grad / comm.size if op == "mean" else grad)
        return None, *((torch.cat(gathered),) if is_whole else gathered)

    return mirrored(comm, f"reduce_scatter(op={op!r})", forward, backward, as_tuple(x))[0]
