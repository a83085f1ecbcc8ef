"""Collectives that move tensors and, in backward, move their gradients back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.comm.autograd.nodes import anchor, check_differentiable, in_backward, unshared
from allstep.comm.communicator import Communicator

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]


def all_gather(comm: Communicator, x: Tensor) -> tuple[Tensor, ...]:
    """Every rank's `x`, on all ranks; backward is `all_to_all`, summed.

    Args:
        comm: the workers.
        x: floating-point tensor; shapes and dtypes may differ between ranks.

    Returns:
        One tensor a rank, on `x`'s device.

    >>> x = torch.ones(2, requires_grad=True)
    >>> (y,) = all_gather(Communicator.single_process(), x)
    >>> y.sum().backward()
    >>> x.grad
    tensor([1., 1.])
    """
    check_differentiable("x", x, "all_gather")
    gathered: tuple[Tensor, ...] = _AllGather.apply(comm, anchor(comm, None), x)  # type: ignore[no-untyped-call]
    return gathered


def all_to_all(comm: Communicator, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Sends `xs[r]` to rank r and returns what each rank sent here; backward is `all_to_all`.

    Args:
        comm: the workers.
        xs: `size` floating-point tensors of any shapes and dtypes.

    Returns:
        One tensor a rank, on the device of `xs`.
    """
    for x in xs:
        check_differentiable("xs", x, "all_to_all")
    got: tuple[Tensor, ...] = _AllToAll.apply(comm, anchor(comm, None), *xs)  # type: ignore[no-untyped-call]
    return got


def broadcast(
    comm: Communicator,
    x: Tensor | None = None,
    root: int = 0,
    *,
    delegate: Tensor | None = None,
) -> Tensor:
    """The root's `x`, on all ranks; backward is `gather`, summed on the root.

    Args:
        comm: the workers.
        x: on the root a floating-point tensor; None elsewhere.
        root: the rank that sends.
        delegate: what this call shall come after; its backward comes after that of this call.

    Returns:
        A new tensor, on the communicator's device; on the root on `x`'s.
    """
    if comm.rank == root:
        check_differentiable("x", x, "broadcast")
    inputs = () if x is None or comm.rank != root else (x,)
    y: Tensor = _Broadcast.apply(comm, root, anchor(comm, delegate), *inputs)  # type: ignore[no-untyped-call]
    return y


def gather(
    comm: Communicator, x: Tensor, root: int = 0, *, delegate: Tensor | None = None
) -> tuple[Tensor, ...] | Tensor:
    """Every rank's `x`, on the root only; backward is `scatter`.

    Args:
        comm: the workers.
        x: floating-point tensor; shapes and dtypes may differ between ranks.
        root: the rank that gets them.
        delegate: what this call shall come after; its backward comes after that of this call.

    Returns:
        On the root one tensor a rank, on `x`'s device; elsewhere a delegate: a zero without dims
        whose backward receives x's gradient.
    """
    check_differentiable("x", x, "gather")
    got: tuple[Tensor, ...] = _Gather.apply(comm, root, anchor(comm, delegate), x)  # type: ignore[no-untyped-call]
    return got if comm.rank == root else got[0]


def scatter(
    comm: Communicator,
    xs: Sequence[Tensor] | None = None,
    root: int = 0,
    *,
    delegate: Tensor | None = None,
) -> Tensor:
    """Gives each rank its entry of the root's `xs`; backward is `gather`.

    Args:
        comm: the workers.
        xs: on the root `size` floating-point tensors of any shapes and dtypes; None elsewhere.
        root: the rank that has them.
        delegate: what this call shall come after; its backward comes after that of this call.

    Returns:
        This rank's entry, on the communicator's device.
    """
    inputs = tuple(xs) if xs is not None and comm.rank == root else ()
    for x in inputs:
        check_differentiable("xs", x, "scatter")
    y: Tensor = _Scatter.apply(comm, root, anchor(comm, delegate), *inputs)  # type: ignore[no-untyped-call]
    return y


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, leaf: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return tuple(unshared(y) for y in comm.all_gather(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        with in_backward(ctx.comm, "all_gather"):
            return None, None, _sum(all_to_all(ctx.comm, grads))


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, leaf: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return tuple(unshared(y) for y in comm.all_to_all(xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with in_backward(ctx.comm, "all_to_all"):
            return None, None, *all_to_all(ctx.comm, grads)


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, root: int, delegate: Tensor, *xs: Tensor) -> Tensor:
        ctx.comm, ctx.root = comm, root
        if xs:
            comm.broadcast(xs[0], root)
            return xs[0].clone()
        y: Tensor = comm.broadcast(None, root)
        return unshared(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with in_backward(ctx.comm, f"broadcast(root={ctx.root})"):
            gathered = gather(ctx.comm, grads[0], ctx.root)
        if isinstance(gathered, Tensor):
            return None, None, gathered
        return None, None, None, _sum(gathered)


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Communicator, root: int, delegate: Tensor, x: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.comm, ctx.root, ctx.device = comm, root, x.device
        gathered = comm.gather(x, root)
        if gathered is None:
            return (torch.zeros((), dtype=delegate.dtype, device=delegate.device),)
        return tuple(unshared(y) for y in gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm, root = ctx.comm, ctx.root
        with in_backward(comm, f"gather(root={root})"):
            if comm.rank == root:
                grad = scatter(comm, grads, root)
            else:
                grad = scatter(comm, None, root, delegate=grads[0])
        return None, None, torch.zeros((), device=grad.device), grad.to(ctx.device)


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, root: int, delegate: Tensor, *xs: Tensor) -> Tensor:
        ctx.comm, ctx.root, ctx.devices = comm, root, [x.device for x in xs]
        y: Tensor = comm.scatter(xs if comm.rank == root else None, root)
        return unshared(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with in_backward(ctx.comm, f"scatter(root={ctx.root})"):
            got = gather(ctx.comm, grads[0], ctx.root)
        if isinstance(got, Tensor):
            return None, None, got
        return None, None, None, *(g.to(d) for g, d in zip(got, ctx.devices, strict=True))


def _sum(xs: Sequence[Tensor]) -> Tensor:
    """In the order of the ranks, so that it does not depend on who came first."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total
