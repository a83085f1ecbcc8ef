"""Pooling of an array that is split over workers in space."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d

from allstep.device import tensor_on
from allstep.errors import UsageError
from allstep.nn.batch_last import from_batch_last, to_batch_last
from allstep.nn.over_windows import OverWindows
from allstep.nn.window_sums import window_sums
from allstep.nn.windows import Grid, Layout, Reach, Window
from allstep.nn.windows.receptive import pair
from allstep.nn.windows.window import check_layout


class _Pool2d(nn.Module):
    """The base class of the three layers: their windows."""

    _fill: ClassVar[float] = 0.0  # outside of the array
    _first_dim: ClassVar[int] = -2  # of the tensors' dims that are the array's

    def __init__(
        self,
        grid: Grid,
        in_layout: Layout,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        check_layout("in_layout", in_layout)
        wanted = (in_layout.shape, kernel_size, stride, padding, dilation, ceil_mode)
        with grid.together(f"{type(self).__name__}{wanted}"):
            kernel, margins = pair("kernel_size", kernel_size, 1), pair("padding", padding, 0)
            if any(2 * margin > k for margin, k in zip(margins, kernel, strict=True)):
                raise UsageError(
                    f"`padding` (={padding}) must be at most half of `kernel_size` (={kernel})."
                )
            reach = Reach(
                kernel,
                kernel if stride is None else pair("stride", stride, 1),
                tuple((margin, margin) for margin in margins),
                pair("dilation", dilation, 1),
            )
            if ceil_mode:
                reach = _with_last_windows(reach, in_layout.shape)
            out_layout = grid.split(reach.out_shape(in_layout.shape))
        self.in_layout = in_layout
        self.out_layout = out_layout
        self._reach = reach
        self._windows = OverWindows(grid, in_layout, out_layout, reach, self._first_dim, self._fill)

    def extra_repr(self) -> str:
        """The layer's arguments, as torch's layers show them."""
        reach = self._reach
        return f"kernel_size={reach.kernel}, stride={reach.stride}, padding={reach.padding}"


def _with_last_windows(reach: Reach, in_shape: Sequence[int]) -> Reach:
    """A reach padded for a last window that begins in the array, as with torch's `ceil_mode`."""
    padding = []
    for dim, length in enumerate(in_shape):
        before, after = reach.padding[dim]
        beyond = length + before + after - reach.extent(dim)  # the first position of the last one
        missing = -beyond % reach.stride[dim]
        if beyond + missing >= length + before:
            missing = 0
        padding.append((before, after + missing))
    return replace(reach, padding=tuple(padding))


class MaxPool2d(_Pool2d):
    """`torch.nn.MaxPool2d` on an array whose rows and columns are split over a grid of workers.

    Args:
        grid: the workers; all of them must make and call the layer.
        in_layout: who owns what of the input.
        kernel_size, stride, padding, dilation, ceil_mode: as torch's.

    Attributes:
        out_layout: who owns what of the output: an even split.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> MaxPool2d(grid, grid.split((6, 4)), 2)(torch.ones(1, 3, 6, 4)).shape
    torch.Size([1, 3, 3, 2])
    """

    _fill = -torch.inf

    def forward(self, x: Tensor) -> Tensor:
        """This worker's part of the output from its part of the input."""
        kernel, stride, dilation = self._reach.kernel, self._reach.stride, self._reach.dilation
        return self._windows.forward(
            x, lambda part, outputs: max_pool2d(part, kernel, stride, 0, dilation)
        )


class AvgPool2d(_Pool2d):
    """`torch.nn.AvgPool2d` on an array whose rows and columns are split over a grid of workers.

    Args:
        grid: the workers; all of them must make and call the layer.
        in_layout: who owns what of the input.
        kernel_size, stride, padding, ceil_mode: as torch's.
        count_include_pad: count the padding among a window's positions.

    Attributes:
        out_layout: who owns what of the output: an even split.
    """

    def __init__(
        self,
        grid: Grid,
        in_layout: Layout,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(grid, in_layout, kernel_size, stride, padding, ceil_mode=ceil_mode)
        self.ceil_mode = ceil_mode
        self.count_include_pad = count_include_pad

    def forward(self, x: Tensor) -> Tensor:
        """This worker's part of the output from its part of the input."""
        return self._windows.forward(x, self._means)

    def _means(self, part: Tensor, outputs: Window) -> Tensor:
        means = avg_pool2d(part, self._reach.kernel, self._reach.stride)
        if self.count_include_pad and not self.ceil_mode:
            return means
        shares = [self._shares(dim, outputs, part) for dim in range(2)]
        return means / (shares[0][:, None] * shares[1])

    def _shares(self, dim: int, outputs: Window, like: Tensor) -> Tensor:
        """The share of each output's receptive field that counts."""
        length, kernel = self.in_layout.shape[dim], self._reach.kernel[dim]
        padding = self._reach.padding[dim][0]
        margin = padding if self.count_include_pad else 0
        firsts = [
            output * self._reach.stride[dim] - padding
            for output in range(outputs.start[dim], outputs.stop[dim])
        ]
        counts = [min(first + kernel, length + margin) - max(first, -margin) for first in firsts]
        return tensor_on(like.device, counts, like.dtype) / kernel


class L2Pool2d(_Pool2d):
    """The root of the sum of squares over each window of a map.

    y = sqrt(eps + sum of x^2 over the window)

    Args:
        grid: the workers; all of them must make and call the layer.
        in_layout: who owns what of the input.
        kernel_size: positions of a window, in each dim.
        stride: positions between two windows; those of a window if None.
        eps: keeps the gradient finite where all is zero.

    Attributes:
        out_layout: who owns what of the output: an even split.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> L2Pool2d(grid, grid.split((2, 2)), 2, eps=0.0)(torch.tensor([[[[1.0, 1.0], [1.0, 1.0]]]]))
    tensor([[[[2.]]]])

    Source: Le et al., 2012, arXiv:1112.6209, section 3.
    """

    _first_dim = 0

    def __init__(
        self,
        grid: Grid,
        in_layout: Layout,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        *,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(grid, in_layout, kernel_size, stride)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """This worker's part of the output from its part; see [Note: batch last]."""
        return from_batch_last(self._windows.forward(to_batch_last(x), self._roots))

    def _roots(self, part: Tensor, outputs: Window) -> Tensor:
        sums = part * part
        for dim in range(2):
            ones = (1.0,) * self._reach.kernel[dim]
            sums = window_sums(sums, ones, self._reach.stride[dim], dim)
        return (sums + self.eps).sqrt()
