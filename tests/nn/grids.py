"""What the tests of distributed arrays share: grids, whole arrays and their parts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.nn.windows import Grid, HaloStats, Layout, Window
from tests.helpers.ranks import run_ranks

GRIDS = ((1, 1), (2, 1), (1, 3), (2, 2), (3, 2), (4, 2))


def values(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def part(x: Tensor, window: Window, first_dim: int = -2) -> Tensor:
    """A window of a whole array, zeros outside of it."""
    first = first_dim % x.dim()
    for dim, (start, stop) in enumerate(zip(window.start, window.stop, strict=True), first):
        before, after = max(0, -start), max(0, stop - x.shape[dim])
        x = torch.cat(
            [
                x.new_zeros([*x.shape[:dim], before, *x.shape[dim + 1 :]]),
                x,
                x.new_zeros([*x.shape[:dim], after, *x.shape[dim + 1 :]]),
            ],
            dim,
        )
        x = x.narrow(dim, start + before, stop - start)
    return x


def whole(parts: list[Tensor], layout: Layout, first_dim: int = -2) -> Tensor:
    """The array of which each worker has its window."""
    first = first_dim % parts[0].dim()
    shape = [*parts[0].shape[:first], *layout.shape, *parts[0].shape[first + len(layout.shape) :]]
    x = parts[0].new_full(shape, torch.nan)
    for window, values_of_it in zip(layout.windows, parts, strict=True):
        x[(slice(None),) * first + window.slices(Window.whole(layout.shape))] = values_of_it
    return x


def on_grid(shape: tuple[int, ...], fn: Callable[[Grid], Any], **options: float) -> list[Any]:
    """fn's result on each worker of a grid."""
    size = 1
    for length in shape:
        size *= length

    def work(comm: Communicator) -> Any:
        return fn(Grid(comm, shape))

    return run_ranks(size, work, **options)


def mirrored(stats: HaloStats) -> HaloStats:
    """The messages of the backward pass: what was sent is received."""
    return HaloStats(
        stats.messages_received, stats.bytes_received, stats.messages_sent, stats.bytes_sent
    )
