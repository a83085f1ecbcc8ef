"""Runs a layer's single-worker code on this worker's windows while its halo travels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from allstep.errors import UsageError
from allstep.nn.windows import (
    Grid,
    Layout,
    Reach,
    Window,
    plan_halo,
    start_halo_gather,
    start_halo_scatter_add,
)
from allstep.nn.windows.receptive import around

Compute = Callable[[Tensor, Window], Tensor]


@dataclass(frozen=True)
class OverWindows:
    """An array computed from another one, each split over the workers.

    Attributes:
        grid: the workers.
        in_layout: who owns what of the input.
        out_layout: who computes what of the output.
        reach: which inputs an output depends on.
        first_dim: the first of the two dims of the tensors that are the array's.
        fill: the value outside of the input.
        block: rows and columns of the output's tensors for each position of `out_layout`.
    """

    grid: Grid
    in_layout: Layout
    out_layout: Layout
    reach: Reach
    first_dim: int = -2
    fill: float = 0.0
    block: tuple[int, int] = (1, 1)

    @property
    def own(self) -> Window:
        """This worker's part of the input."""
        return self.in_layout.windows[self.grid.rank]

    @property
    def outputs(self) -> Window:
        """This worker's part of the output."""
        return self.out_layout.windows[self.grid.rank]

    @cached_property
    def input_windows(self) -> tuple[Window, ...]:
        """The part of the input that each worker needs, by rank."""
        return tuple(self.reach.inputs(window) for window in self.out_layout.windows)

    @cached_property
    def is_local(self) -> bool:
        """Whether every worker has all inputs that it needs."""
        ranks = range(self.grid.size)
        plans = (plan_halo(self.in_layout, self.input_windows, rank) for rank in ranks)
        return not any(plan.receives for plan in plans)

    @cached_property
    def inner(self) -> Window:
        """The outputs to compute while messages travel: those that need no neighbour.

        None of them where this worker receives nothing.
        """
        start = self.outputs.start
        if not plan_halo(self.in_layout, self.input_windows, self.grid.rank).receives:
            return Window(start, start)
        return self.reach.inner(self.outputs, self.own, self.in_layout.shape)

    @cached_property
    def strips(self) -> tuple[Window, ...]:
        """The outputs around the inner ones."""
        strips = around(self.outputs, self.inner)
        return tuple(strip for strip in strips if strip.num_positions)

    def forward(self, x: Tensor, compute: Compute) -> Tensor:
        """This worker's outputs.

        Args:
            x: this worker's part of the input.
            compute: outputs from exactly the inputs that they depend on. It is called for parts
                of the output, with those parts' windows.
        """
        if self.is_local:
            check_window(x, self.own, self.first_dim, "x")
            return compute(self._local_inputs(x, self.outputs), self.outputs)
        local, work = start_halo_gather(
            self.grid,
            x,
            self.in_layout,
            self.input_windows,
            pieces=[self.reach.inputs(strip) for strip in self.strips],
            first_dim=self.first_dim,
            fill=self.fill,
        )
        parts: dict[Window, Tensor] = {}
        if self.inner.num_positions:
            parts[self.inner] = compute(self._local_inputs(local, self.inner), self.inner)
        for strip, inputs in zip(self.strips, work.wait(), strict=True):
            parts[strip] = compute(inputs, strip)
        return self._joined(parts)

    def backward_of_inputs(self, y: Tensor, compute: Compute) -> Tensor:
        """The transpose of `forward`: the gradient of this worker's inputs by all workers' outputs.

        Args:
            y: this worker's part of the output.
            compute: what exactly the inputs that they depend on get from outputs.
        """
        check_window(y, self.outputs.scaled(self.block), self.first_dim, "y")
        if self.is_local:
            return self._home(compute(y, self.outputs), self.outputs)
        kept, finish = start_halo_scatter_add(
            self.grid,
            [compute(self._part(y, strip), strip) for strip in self.strips],
            self.in_layout,
            self.input_windows,
            pieces=[self.reach.inputs(strip) for strip in self.strips],
            first_dim=self.first_dim,
        )
        if self.inner.num_positions:
            kept = kept + self._home(compute(self._part(y, self.inner), self.inner), self.inner)
        return finish(kept)

    def _local_inputs(self, x: Tensor, outputs: Window) -> Tensor:
        """The inputs of outputs that need no neighbour."""
        return _cut(x, self.own, self.reach.inputs(outputs), self.first_dim, self.fill)

    def _home(self, x: Tensor, outputs: Window) -> Tensor:
        """The gradient that some outputs give to this worker's inputs, zeros elsewhere."""
        return _cut(x, self.reach.inputs(outputs), self.own, self.first_dim, 0.0)

    def _part(self, y: Tensor, outputs: Window) -> Tensor:
        held = self.outputs.scaled(self.block)
        return _cut(y, held, outputs.scaled(self.block), self.first_dim, 0.0)

    def _joined(self, parts: dict[Window, Tensor]) -> Tensor:
        """The tensor of all outputs from the inner ones and the strips around them."""
        above, left, right, below = around(self.outputs, self.inner)
        middle = _cat(parts, (left, self.inner, right), self.first_dim + 1)
        lines = {above: parts.get(above), self.inner: middle, below: parts.get(below)}
        joined = _cat(lines, (above, self.inner, below), self.first_dim)
        assert joined is not None, "an output window is never empty"
        return joined


def _cat(parts: Mapping[Window, Tensor | None], order: Sequence[Window], dim: int) -> Tensor | None:
    """Concatenates the parts that are not None."""
    found = [part for part in map(parts.get, order) if part is not None]
    return (torch.cat(found, dim) if len(found) > 1 else found[0]) if found else None


def check_window(x: Tensor, window: Window, first_dim: int, name: str) -> None:
    """Raises UsageError unless a tensor has a window's size in the array's dims."""
    first = first_dim % x.dim() if x.dim() else 0
    if tuple(x.shape[first : first + 2]) != window.shape:
        raise UsageError(
            f"`{name}` has shape {list(x.shape)}; this worker's window {window} needs "
            f"{list(window.shape)} in dims {first} and {first + 1}."
        )


def _cut(x: Tensor, held: Window, wanted: Window, first_dim: int, fill: float) -> Tensor:
    """A window of a tensor that holds another one; `fill` where they do not overlap."""
    first = first_dim % x.dim()
    both = held.intersect(wanted)
    x = both.view(x, held, first)
    margins = []
    for dim in reversed(range(2)):  # pad names the last dim first
        margins += [both.start[dim] - wanted.start[dim], wanted.stop[dim] - both.stop[dim]]
    return pad(x, [0, 0] * (x.dim() - first - 2) + margins, value=fill) if any(margins) else x
