"""Local contrast normalisation of an array that is split over workers in space."""

from math import exp

import torch
from torch import Tensor, nn

from allstep.comm.autograd import all_reduce
from allstep.device import tensor_on
from allstep.errors import UsageError, check_integer
from allstep.nn.batch_last import from_batch_last, to_batch_last
from allstep.nn.over_windows import OverWindows
from allstep.nn.window_sums import window_sums
from allstep.nn.windows import Grid, Layout, Reach, Window
from allstep.nn.windows.window import check_layout


class _LocalMean(nn.Module):
    """The Gaussian mean around each position, over all channels.

    mean(x)[i, j] = sum of w[p, q] * x[c, i + p, j + q] / sum of w[p, q]

    over all channels c and offsets p, q that lie in the array.
    """

    def __init__(self, grid: Grid, in_layout: Layout, kernel_size: int) -> None:
        super().__init__()
        check_layout("in_layout", in_layout)
        with grid.together(f"{type(self).__name__}{(in_layout.shape, kernel_size)}"):
            check_integer("kernel_size", kernel_size, cure="it must be odd, to have a centre")
            if kernel_size % 2 == 0:
                raise UsageError(f"`kernel_size` (={kernel_size}) must be odd, to have a centre.")
            margin = (kernel_size // 2, kernel_size // 2)
            reach = Reach((kernel_size,) * 2, (1, 1), (margin, margin), (1, 1))
        self.in_layout = in_layout
        self.out_layout = in_layout
        self._weights = _gaussian(kernel_size)
        self._windows = OverWindows(grid, in_layout, in_layout, reach, first_dim=0)

    def _local_mean(self, x: Tensor) -> Tensor:
        """[height, width, channel, batch] -> [height, width, 1, batch]."""
        return self._windows.forward(x.mean(2, keepdim=True), self._means)

    def _means(self, part: Tensor, outputs: Window) -> Tensor:
        for dim in range(2):
            part = window_sums(part, self._weights, 1, dim)
            part = part / self._weight_inside(dim, outputs, part)
        return part

    def _weight_inside(self, dim: int, outputs: Window, like: Tensor) -> Tensor:
        """The sum of the weights that fall into the array, at each output."""
        radius = len(self._weights) // 2
        positions = range(outputs.start[dim], outputs.stop[dim])
        length = self.in_layout.shape[dim]
        sums = [
            sum(w for p, w in enumerate(self._weights, i - radius) if 0 <= p < length)
            for i in positions
        ]
        shape = [-1 if d == dim else 1 for d in range(like.dim())]
        return tensor_on(like.device, sums, like.dtype).view(shape)


class SubtractiveNorm(_LocalMean):
    """Subtracts the Gaussian mean around each position; see `LocalContrastNorm`.

    y = x - mean(x)

    Args:
        grid: the workers; all of them must make and call the layer.
        in_layout: who owns what of the input, and of the output.
        kernel_size: rows and columns of the neighbourhood; odd.

    Raises:
        UsageError: if `kernel_size` has no centre.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> norm = SubtractiveNorm(grid, grid.split((8, 8)), 5)
    >>> norm(torch.ones(1, 3, 8, 8)).abs().max() < 1e-6
    tensor(True)
    """

    def forward(self, x: Tensor) -> Tensor:
        """This worker's part of the output from its part; see [Note: batch last]."""
        x = to_batch_last(x)
        return from_batch_last(x - self._local_mean(x))


class DivisiveNorm(_LocalMean):
    """Divides by the Gaussian root mean square around each position; see `LocalContrastNorm`.

    y = x / max(floor, sqrt(mean(x^2)))

    Args:
        grid: the workers; all of them must make and call the layer.
        in_layout: who owns what of the input, and of the output.
        kernel_size: rows and columns of the neighbourhood; odd.
        floor: the smallest divisor; None for the mean of sqrt(mean(x^2)) over the array.

    Raises:
        UsageError: if `kernel_size` has no centre, or `floor` isn't positive.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> norm = DivisiveNorm(grid, grid.split((8, 8)), 5)
    >>> (norm(torch.full((1, 3, 8, 8), 7.0)) - 1).abs().max() < 1e-6
    tensor(True)
    """

    def __init__(
        self, grid: Grid, in_layout: Layout, kernel_size: int, floor: float | None = 0.01
    ) -> None:
        super().__init__(grid, in_layout, kernel_size)
        if floor is not None and not floor > 0:
            raise UsageError(f"`floor` (={floor}) must be positive, or None.")
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        """This worker's part of the output from its part; see [Note: batch last]."""
        x = to_batch_last(x)
        square = self._local_mean(x * x)
        if self.floor is not None:
            return from_batch_last(x / square.clamp_min(self.floor**2).sqrt())
        deviation = square.clamp_min(torch.finfo(x.dtype).tiny).sqrt()
        total = all_reduce(self._windows.grid.comm, deviation.sum((0, 1, 2)))
        mean = total / Window.whole(self.in_layout.shape).num_positions
        return from_batch_last(x / torch.maximum(deviation, mean))


class LocalContrastNorm(nn.Sequential):
    """Subtractive and divisive normalisation of an array that is split over a grid of workers.

    v = x - mean(x);  y = v / max(floor, sqrt(mean(v^2)))

    with Gaussian means over all channels and a neighbourhood; at the array's edges its part
    outside has no weight.

    Args:
        grid: the workers; all of them must make and call the layer.
        in_layout: who owns what of the input, and of the output.
        kernel_size: rows and columns of the neighbourhood; odd. The Gaussian's standard deviation
            is a quarter of it.
        floor: the smallest divisor; None for the mean of sqrt(mean(v^2)) over the array, as
            Jarrett et al. have it.

    Raises:
        UsageError: if `kernel_size` has no centre, or `floor` isn't positive.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> norm = LocalContrastNorm(grid, grid.split((8, 8)), 5)
    >>> norm(torch.ones(1, 3, 8, 8)).abs().max() < 1e-4
    tensor(True)

    Source: Jarrett et al., 2009, ICCV, section 2; Le et al., 2012, arXiv:1112.6209, section 3.
    """

    def __init__(
        self, grid: Grid, in_layout: Layout, kernel_size: int, floor: float | None = 0.01
    ) -> None:
        super().__init__(
            SubtractiveNorm(grid, in_layout, kernel_size),
            DivisiveNorm(grid, in_layout, kernel_size, floor),
        )
        self.in_layout = in_layout
        self.out_layout = in_layout


def _gaussian(size: int) -> tuple[float, ...]:
    """Gaussian weights that sum to 1; the standard deviation is a quarter of the size."""
    weights = [exp(-((i - size // 2) ** 2) / (2 * (size / 4) ** 2)) for i in range(size)]
    return tuple(weight / sum(weights) for weight in weights)
