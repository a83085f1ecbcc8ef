"""Collectives that move tensors and, in backward, send their gradients back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from allstep.comm.autograd.nodes import Gradients, check_differentiable, mirrored
from allstep.comm.communicator import Communicator


def all_gather(comm: Communicator, x: Tensor) -> tuple[Tensor, ...]:
    """Every rank's `x`, on all ranks; backward is `all_to_all`, summed.

    Args:
        comm: the workers.
        x: floating-point tensor; shapes and dtypes may differ between ranks.

    Returns:
        One tensor per rank, on `x`'s device.

    >>> x = torch.ones(2, requires_grad=True)
    >>> (y,) = all_gather(Communicator.single_process(), x)
    >>> y.sum().backward()
    >>> x.grad
    tensor([1., 1.])
    """
    check_differentiable("x", x, "all_gather")
    return mirrored(
        comm,
        "all_gather",
        lambda leaf, x: comm.all_gather(x),
        lambda *grads: (None, _sum(all_to_all(comm, grads))),
        (x,),
    )


def all_to_all(comm: Communicator, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Sends `xs[r]` to rank r and returns what each rank sent here; backward is `all_to_all`.

    Args:
        comm: the workers.
        xs: `size` floating-point tensors of any shapes and dtypes.

    Returns:
        One tensor per rank, on the device of `xs`.
    """
    for x in xs:
        check_differentiable("xs", x, "all_to_all")
    return mirrored(
        comm,
        "all_to_all",
        lambda leaf, *xs: comm.all_to_all(xs),
        lambda *grads: (None, *all_to_all(comm, grads)),
        xs,
    )


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
        delegate: result of a call that this one must follow; in backward this call's gradient comes
            first.

    Returns:
        A new tensor, on the communicator's device; on the root, on `x`'s device.
    """
    if comm.rank == root:
        check_differentiable("x", x, "broadcast")

    def forward(leaf: Tensor, *xs: Tensor) -> tuple[Tensor]:
        if not xs:
            return (comm.broadcast(None, root),)
        comm.broadcast(xs[0], root)
        return (xs[0].clone(),)

    def backward(grad: Tensor) -> Gradients:
        gathered = gather(comm, grad, root)
        return (gathered,) if isinstance(gathered, Tensor) else (None, _sum(gathered))

    inputs = () if x is None or comm.rank != root else (x,)
    return mirrored(comm, f"broadcast(root={root})", forward, backward, inputs, delegate)[0]


def gather(
    comm: Communicator, x: Tensor, root: int = 0, *, delegate: Tensor | None = None
) -> tuple[Tensor, ...] | Tensor:
    """Every rank's `x`, on the root only; backward is `scatter`.

    Args:
        comm: the workers.
        x: floating-point tensor; shapes and dtypes may differ between ranks.
        root: the rank that receives them.
        delegate: result of a call that this one must follow; in backward this call's gradient comes
            first.

    Returns:
        On the root one tensor per rank, on `x`'s device; elsewhere a delegate: a zero without
        dimensions whose backward receives x's gradient.
    """
    check_differentiable("x", x, "gather")
    device, is_root = x.device, comm.rank == root

    def forward(leaf: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return comm.gather(x, root) or (torch.zeros_like(leaf),)

    def backward(*grads: Tensor) -> Gradients:
        if is_root:
            grad = scatter(comm, grads, root)
        else:
            grad = scatter(comm, None, root, delegate=grads[0])
        return torch.zeros((), device=grad.device), grad.to(device)

    got = mirrored(comm, f"gather(root={root})", forward, backward, (x,), delegate)
    return got if is_root else got[0]


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
        root: the rank that sends them.
        delegate: result of a call that this one must follow; in backward this call's gradient comes
            first.

    Returns:
        This rank's entry, on the communicator's device.
    """
    inputs = tuple(xs) if xs is not None and comm.rank == root else ()
    for x in inputs:
        check_differentiable("xs", x, "scatter")
    devices = [x.device for x in inputs]

    def forward(leaf: Tensor, *xs: Tensor) -> tuple[Tensor]:
        return (comm.scatter(xs if comm.rank == root else None, root),)

    def backward(grad: Tensor) -> Gradients:
        got = gather(comm, grad, root)
        if isinstance(got, Tensor):
            return (got,)
        return None, *(g.to(device) for g, device in zip(got, devices, strict=True))

    return mirrored(comm, f"scatter(root={root})", forward, backward, inputs, delegate)[0]


def _sum(xs: Sequence[Tensor]) -> Tensor:
    """The sum in the order of the ranks, so that it does not depend on the order of arrival."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total
