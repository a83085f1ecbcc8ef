"""Locally connected layers with untied weights on an array that is split over workers.

[Note: blocks] The neurons of a block - `depth` maps at `height` x `width` neighbouring positions -
share one receptive field, so a block's response is one dense matrix product. Blocks lie side by
side: the next one's receptive field is `stride` positions on. A bigger block means bigger products,
and for as many neurons as before a bigger stride.
"""

from collections.abc import Sequence
from math import prod, sqrt
from typing import ClassVar

import torch
from torch import Tensor, nn

from allstep.comm import PartOfArray
from allstep.errors import UsageError, check_integer
from allstep.nn.batch_last import from_batch_last, to_batch_last
from allstep.nn.filter_parts import Filters, cut_filters
from allstep.nn.local_products import Fields
from allstep.nn.over_windows import OverWindows
from allstep.nn.replicated import agreed_seed, generator_at
from allstep.nn.windows import Grid, Layout, Reach, Window
from allstep.nn.windows.receptive import pair
from allstep.nn.windows.window import check_layout


class _Blocks(PartOfArray):
    """The blocks of this worker, and their filters."""

    bias_names: ClassVar[tuple[str, ...]] = ("bias",)  # for `allstep.optim.groups`

    def __init__(
        self, windows: OverWindows, in_channels: int, depth: int, weight: nn.Parameter
    ) -> None:
        super().__init__(windows.grid.comm)
        self.in_channels = in_channels
        self.depth = depth
        self.weight = weight
        self._windows = windows
        self._fields = Fields(_two(windows.reach.kernel), _two(windows.reach.stride))

    def _checked(self, x: Tensor, channels: int) -> Tensor:
        """The input; under autocast, which casts no products into a buffer, in the weight's dtype.

        Raises:
            UsageError: unless weight and input fit this worker's blocks.
        """
        blocks = self._windows.outputs.shape
        kernel, block = self._windows.reach.kernel, self._windows.block
        fan_in = kernel[0] * kernel[1] * self.in_channels
        wanted = (*blocks, block[0] * block[1] * self.depth, fan_in)
        fault = None
        if tuple(self.weight.shape) != wanted:
            fault = (
                f"`weight` has shape {list(self.weight.shape)}; rank {self._windows.grid.rank}'s "
                f"{blocks[0]} x {blocks[1]} blocks need {list(wanted)}."
            )
        elif x.dim() != 4 or x.shape[1] != channels:
            fault = f"`x` has shape {list(x.shape)}; pass [batch, {channels}, height, width]."
        self._windows.grid.agree(f"a call of {self}", fault)
        return x.to(self.weight.dtype) if torch.is_autocast_enabled(x.device.type) else x

    def _filters(self) -> dict[Window, Filters]:
        """The weight of the inner blocks and of the strips around them."""
        windows = self._windows
        if self.comm.size > 1:
            for p in self.parameters(recurse=False):  # a copy has lost it
                p.shard_group = self.comm  # type: ignore[attr-defined]
        parts = [windows.outputs]
        if not windows.is_local:
            parts = [p for p in (windows.inner, *windows.strips) if p.num_positions]
        places = [part.slices(windows.outputs) for part in parts]
        return dict(zip(parts, cut_filters(self.weight, places), strict=True))

    def extra_repr(self) -> str:
        """The layer's arguments, as torch's layers show them."""
        reach, block = self._windows.reach, (self.depth, *self._windows.block)
        return (
            f"{self.in_channels}, kernel_size={reach.kernel}, stride={reach.stride}, block={block}"
        )


class LocallyConnected2d(_Blocks):
    """Filters that differ from place to place; see [Note: blocks].

    y[:, f of block i, j] = weight[i, j, f] . x[:, :, i * stride : i * stride + kernel_size, ...]

    Every worker has only the filters of its own part of the output.

    Args:
        grid: the workers; all of them must make and call the layer.
        in_layout: who owns what of the input, such as `grid.split((height, width))` or the
            `out_layout` of the layer before.
        in_channels: of the input.
        kernel_size: rows and columns of a receptive field.
        stride: rows and columns between the receptive fields of neighbouring blocks.
        block: maps, rows and columns of a block. The output has as many maps.
        bias: whether each neuron has one.
        seed: of the initial values, uniform in +-1 / sqrt(fan_in), which depend only on a block's
            place in the whole array; None to draw it from torch's default generator on rank 0.
        dtype: of the weight.

    Attributes:
        weight: [rows, columns, block height * width * depth, fan_in] of this worker's blocks;
            fan_in = kernel height * kernel width * in_channels, in this order.
        bias: [block height * rows, block width * columns, depth] or None.
        out_layout: who owns what of the output; blocks are split evenly.
        block_layout: who has which blocks, and so which filters.

    Raises:
        UsageError: if the array is smaller than a receptive field, or has fewer blocks than the
            grid workers.
        DisagreementError: if workers pass other arguments.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> layer = LocallyConnected2d(grid, grid.split((9, 9)), 3, 5, stride=2, block=(4, 2, 2))
    >>> layer(torch.ones(8, 3, 9, 9)).shape, layer.weight.shape
    (torch.Size([8, 4, 6, 6]), torch.Size([3, 3, 16, 75]))

    Source: Coates et al., 2013, "Deep learning with COTS HPC systems"; Le et al., 2012,
    arXiv:1112.6209.
    """

    def __init__(
        self,
        grid: Grid,
        in_layout: Layout,
        in_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        block: Sequence[int],
        bias: bool = True,
        *,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_layout("in_layout", in_layout)
        wanted = (in_layout.shape, in_channels, kernel_size, stride, block, bias)
        with grid.together(f"LocallyConnected2d{wanted}"):
            check_integer("in_channels", in_channels)
            depth, *sides = _block(block)
            kernel, strides = pair("kernel_size", kernel_size, 1), pair("stride", stride, 1)
            reach = Reach(kernel, strides, ((0, 0), (0, 0)), (1, 1))
            blocks = grid.split(reach.out_shape(in_layout.shape))
            windows = OverWindows(grid, in_layout, blocks, reach, first_dim=0, block=_two(sides))
            shape = (depth * sides[0] * sides[1], kernel[0] * kernel[1] * in_channels)
            weight = _room_for(windows, shape, dtype)
        super().__init__(windows, in_channels, depth, nn.Parameter(weight))
        self.in_layout = in_layout
        self.out_layout = blocks.scaled(sides)
        self.block_layout = blocks
        self._seed = agreed_seed(grid.comm, seed)
        values = torch.empty(
            *windows.outputs.scaled(sides).shape, depth, dtype=dtype, device=weight.device
        )
        self.bias = nn.Parameter(values) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the initial values, the same for each block whatever the grid."""
        (top, left), sides = self._windows.outputs.start, self._windows.block
        bound = 1 / sqrt(self.weight.shape[3])
        values = torch.empty(self.weight.shape[2:], dtype=self.weight.dtype)
        for i, row in enumerate(self.weight):
            for j, filters in enumerate(row):
                generator = generator_at(self._seed, top + i, left + j)
                filters.copy_(values.uniform_(-bound, bound, generator=generator))
                if self.bias is not None:
                    biases = torch.empty(*sides, self.depth, dtype=self.bias.dtype)
                    place = Window((i, j), (i + 1, j + 1)).scaled(sides)
                    self.bias[place.slices(Window.whole((0, 0)))] = biases.uniform_(
                        -bound, bound, generator=generator
                    )

    def forward(self, x: Tensor) -> Tensor:
        """This worker's part of the output; see [Note: batch last].

        Args:
            x: [batch, in_channels, *its window's shape], this worker's part of the input.

        Returns:
            [batch, depth, *its window's shape].
        """
        x = self._checked(x, self.in_channels)
        filters = self._filters()
        y = self._windows.forward(
            to_batch_last(x),
            lambda part, blocks: _to_rows(
                filters[blocks].responses(part, self._fields), self._windows.block
            ),
        )
        return from_batch_last(y if self.bias is None else y + self.bias.unsqueeze(3))


class LocallyConnectedTranspose2d(_Blocks):
    """The decoder of a `LocallyConnected2d`: its transpose.

    x[:, :, receptive field of block i, j] += weight[i, j].T y[:, block i, j]

    What receptive fields reach into other workers' parts is sent there and added.

    Args:
        encoder: the layer whose output is decoded, on the same workers.
        tied: use the encoder's weight itself; otherwise a copy of it, trained apart.

    Attributes:
        weight: as the encoder's.
        in_layout, out_layout: the encoder's out_layout and in_layout.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process())
    >>> encoder = LocallyConnected2d(grid, grid.split((9, 9)), 3, 5, stride=2, block=(4, 1, 1))
    >>> decoder = LocallyConnectedTranspose2d(encoder, tied=True)
    >>> decoder(encoder(torch.ones(8, 3, 9, 9))).shape, decoder.weight is encoder.weight
    (torch.Size([8, 3, 9, 9]), True)
    """

    def __init__(self, encoder: LocallyConnected2d, *, tied: bool) -> None:
        weight = encoder.weight if tied else nn.Parameter(encoder.weight.detach().clone())
        super().__init__(encoder._windows, encoder.in_channels, encoder.depth, weight)
        self.in_layout = encoder.out_layout
        self.out_layout = encoder.in_layout

    def forward(self, y: Tensor) -> Tensor:
        """This worker's part of the reconstruction; see [Note: batch last].

        Args:
            y: [batch, depth, *its window's shape], this worker's part of the encoder's output.

        Returns:
            [batch, in_channels, *its window's shape].
        """
        y = self._checked(y, self.depth)
        filters = self._filters()
        x = self._windows.backward_of_inputs(
            to_batch_last(y),
            lambda part, blocks: filters[blocks].spread(
                _to_blocks(part, self._windows.block), self._fields
            ),
        )
        return from_batch_last(x)


def _room_for(windows: OverWindows, shape: tuple[int, int], dtype: torch.dtype | None) -> Tensor:
    """An empty weight for this worker's blocks."""
    size = (*windows.outputs.shape, *shape)
    try:
        return torch.empty(size, dtype=dtype, device=windows.grid.comm.device)
    except RuntimeError as error:  # torch's out-of-memory errors are such
        num_bytes = prod(size) * (dtype or torch.get_default_dtype()).itemsize
        raise UsageError(
            f"rank {windows.grid.rank}'s filters take {num_bytes} bytes, for which there is no "
            f"room; use more than {windows.grid.size} workers, which have a part of them each."
        ) from error


def _to_rows(y: Tensor, block: tuple[int, int]) -> Tensor:
    """[rows, columns, filters, batch] of blocks as [height, width, depth, batch]."""
    rows, columns, num_filters, batch = y.shape
    depth = num_filters // (block[0] * block[1])
    y = y.view(rows, columns, *block, depth, batch).transpose(1, 2)
    return y.reshape(rows * block[0], columns * block[1], depth, batch)


def _to_blocks(y: Tensor, block: tuple[int, int]) -> Tensor:
    """The inverse of `_to_rows`."""
    height, width, depth, batch = y.shape
    rows, columns = height // block[0], width // block[1]
    y = y.view(rows, block[0], columns, block[1], depth, batch).transpose(1, 2)
    return y.reshape(rows, columns, block[0] * block[1] * depth, batch)


def _block(block: Sequence[int]) -> tuple[int, int, int]:
    values = tuple(block) if isinstance(block, Sequence) else ()
    if len(values) != 3 or not all(isinstance(v, int) and v >= 1 for v in values):
        raise UsageError(f"`block` (={block!r}) must be depth, height and width, at least 1 each.")
    return values


def _two(values: Sequence[int]) -> tuple[int, int]:
    first, second = values
    return first, second
