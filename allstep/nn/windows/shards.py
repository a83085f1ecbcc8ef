"""Full tensors from local shards and back, for what is small or done once."""

import torch
from torch import Tensor

from allstep.nn.windows.grid import Grid
from allstep.nn.windows.window import Layout, Window


@torch.no_grad()
def full_tensor(
    grid: Grid, x: Tensor, layout: Layout, *, first_dim: int = -2, root: int = 0
) -> Tensor | None:
    """The whole array on the root, from each worker's part; None elsewhere.

    Args:
        grid: the workers; all of them must call this.
        x: this worker's part.
        layout: who owns what.
        first_dim: the first of the tensor's dims that are the array's.
        root: the rank that gets the array, and needs the memory for it.

    Returns:
        The array on the root, without gradient; None elsewhere.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> full_tensor(grid, torch.ones(3, 4, 6), grid.split((4, 6))).shape
    torch.Size([3, 4, 6])
    """
    if grid.size == 1:
        return x.detach().clone()
    parts = grid.comm.gather(x.detach().contiguous(), root)
    if parts is None:
        return None
    first = first_dim % x.dim()
    last = first + len(layout.shape)
    whole = x.new_empty([*x.shape[:first], *layout.shape, *x.shape[last:]])
    for part, window in zip(parts, layout.windows, strict=True):
        window.view(whole, Window.whole(layout.shape), first).copy_(part)
    return whole


def local_shard(grid: Grid, whole: Tensor, layout: Layout, *, first_dim: int = -2) -> Tensor:
    """This worker's part of an array that it has whole.

    Args:
        grid: the workers.
        whole: the array, with as many rows and columns as `layout.shape` at `first_dim`.
        layout: who owns what.
        first_dim: the first of the tensor's dims that are the array's.

    Returns:
        A view of the part.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> local_shard(grid, torch.ones(3, 4, 6), grid.split((4, 6))).shape
    torch.Size([3, 4, 6])
    """
    return layout.windows[grid.rank].view(whole, Window.whole(layout.shape), first_dim)
