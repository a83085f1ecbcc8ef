"""Convolution of an array that is split over workers in space."""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from allstep.errors import UsageError, check_integer
from allstep.nn.over_windows import OverWindows
from allstep.nn.replicated import agreed_seed, generator_at, replicated
from allstep.nn.windows import Grid, Layout, Reach
from allstep.nn.windows.receptive import pair
from allstep.nn.windows.window import check_layout


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d` on an array whose rows and columns are split over a grid of workers.

    Every worker has the whole weight and computes its part of the output; what its receptive
    fields need of other workers' parts it fetches while it computes the rest. The weight's
    gradient is summed over the workers, so that equal weights stay equal.

    Args:
        grid: the workers; all of them must make and call the layer.
        in_layout: who owns what of the input, such as `grid.split((height, width))` or the
            `out_layout` of the layer before.
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: as torch's.
        seed: of the initial weight, which is distributed as torch's; None to draw it from torch's
            default generator on rank 0.
        dtype: of the weight.

    Attributes:
        out_layout: who owns what of the output: an even split.

    Raises:
        UsageError: if the array is smaller than the kernel, or the output than the grid.
        DisagreementError: if workers pass other arguments.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> conv = Conv2d(grid, grid.split((6, 6)), 3, 8, kernel_size=3, padding=1)
    >>> conv(torch.ones(2, 3, 6, 6)).shape
    torch.Size([2, 8, 6, 6])
    """

    def __init__(
        self,
        grid: Grid,
        in_layout: Layout,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_layout("in_layout", in_layout)
        wanted = (in_layout.shape, in_channels, out_channels, kernel_size, stride, padding)
        with grid.together(f"Conv2d{(*wanted, dilation, groups, bias)}"):
            check_integer("in_channels", in_channels)
            check_integer("out_channels", out_channels)
            kernel = pair("kernel_size", kernel_size, 1)
            strides, dilations = pair("stride", stride, 1), pair("dilation", dilation, 1)
            margins = _margins(padding, kernel, strides, dilations)
            reach = Reach(kernel, strides, margins, dilations)
            out_layout = grid.split(reach.out_shape(in_layout.shape))
        self._seed = agreed_seed(grid.comm, seed)
        super().__init__(
            in_channels,
            out_channels,
            kernel,
            strides,
            padding if isinstance(padding, str) else pair("padding", padding, 0),
            dilations,
            groups,
            bias,
            device=grid.comm.device,
            dtype=dtype,
        )
        self.in_layout = in_layout
        self.out_layout = out_layout
        self._windows = OverWindows(grid, in_layout, out_layout, reach)

    def reset_parameters(self) -> None:
        """Draws torch's initial values, the same on every worker."""
        generator = generator_at(self._seed)
        values = torch.empty(self.weight.shape, dtype=self.weight.dtype)
        with torch.no_grad():
            self.weight.copy_(nn.init.kaiming_uniform_(values, a=sqrt(5), generator=generator))
            if self.bias is not None:
                bound = 1 / sqrt(self.weight[0].numel())
                bias = torch.empty(self.bias.shape, dtype=self.bias.dtype)
                self.bias.copy_(bias.uniform_(-bound, bound, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """This worker's part of the output.

        Args:
            x: [batch, in_channels, *its window's shape], this worker's part of the input.

        Returns:
            [batch, out_channels, *its window's shape].
        """
        weight, bias = replicated(self._windows.grid.comm, (self.weight, self.bias))
        assert weight is not None
        strides, dilations = self.stride, self.dilation
        return self._windows.forward(
            x,
            lambda part, outputs: conv2d(part, weight, bias, strides, 0, dilations, self.groups),
        )


def _margins(
    padding: int | Sequence[int] | str,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
) -> tuple[tuple[int, int], ...]:
    """Positions of padding before and after the array in each dim, as torch has them."""
    if not isinstance(padding, str):
        return tuple((n, n) for n in pair("padding", padding, 0))
    if padding == "valid":
        return ((0, 0), (0, 0))
    if padding != "same":
        raise UsageError(f"`padding` (={padding!r}) must be 'same', 'valid' or numbers.")
    if stride != (1, 1):
        raise UsageError(f"`padding` (='same') needs a `stride` of 1, not {stride}.")
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return tuple((total // 2, total - total // 2) for total in totals)
