"""Matrix products of untied filters with their receptive fields, without an unfolded array.

[Note: tiles] With the batch last a row of a receptive field is one contiguous
[kernel * channels, batch] matrix, and the receptive fields of neighbouring blocks are strided
views of the array. A few of them, as many as stay in the cache, are copied side by side into a
buffer that is used again and again; there they are one batch of [fan_in, batch] matrices, and a
batched product with the blocks' filters does the rest. Unfolding would write every receptive
field to memory at once, (kernel / stride)^2 times the array.

The three functions are linear in each argument, and the backward of each is the other two.
Shapes: x [height, width, channels, batch]; weight [rows, columns, filters, fan_in] of blocks,
where fan_in = kernel * kernel * channels in this order; y [rows, columns, filters, batch].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.device import is_accelerator

_CUDA_BUFFER_BYTES = 1 << 28


@dataclass(frozen=True)
class Fields:
    """The positions of the receptive fields.

    Attributes:
        kernel: rows and columns of a receptive field.
        stride: rows and columns between those of neighbouring blocks.
        cpu_buffer_bytes: of a tile, on each thread; about what a core's own cache holds.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    cpu_buffer_bytes: int = 1 << 20

    def input_shape(self, blocks: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the input that a number of blocks see.

        >>> Fields((3, 3), (2, 2)).input_shape((2, 4))
        (5, 9)
        """
        height, width = (
            (n - 1) * s + k for n, s, k in zip(blocks, self.stride, self.kernel, strict=True)
        )
        return height, width

    def view(self, x: Tensor, row: int, first: int, num: int, every: int = 1) -> Tensor:
        """Receptive fields of a row of blocks, as [num, kernel, kernel * channels, batch].

        Args:
            x: what they are in; contiguous, or a window of what is.
            row, first: which blocks; `num` of them, each `every` columns after the last.
        """
        _, _, channels, batch = x.shape
        line, pixel, _, _ = x.stride()
        return x.as_strided(
            (num, self.kernel[0], self.kernel[1] * channels, batch),
            (every * self.stride[1] * pixel, line, batch, 1),
            x.storage_offset() + row * self.stride[0] * line + first * self.stride[1] * pixel,
        )

    def overlap(self) -> int:
        """The distance in blocks at which receptive fields of a row do not overlap."""
        return -(-self.kernel[1] // self.stride[1])


MakeBuffer = Callable[[], Tensor]


def responses(
    x: Tensor, weight: Tensor, fields: Fields, grad_buffer: MakeBuffer | None = None
) -> Tensor:
    """y[i, j] = weight[i, j] @ x[receptive field of i, j].

    `grad_buffer` gives the tensor that the weight's gradient is written to.
    """
    y: Tensor = _Responses.apply(x, weight, fields, grad_buffer)  # type: ignore[no-untyped-call]
    return y


def spread(
    y: Tensor, weight: Tensor, fields: Fields, grad_buffer: MakeBuffer | None = None
) -> Tensor:
    """x[receptive field of i, j] += weight[i, j].T @ y[i, j], for all blocks i, j.

    `grad_buffer` gives the tensor that the weight's gradient is written to.
    """
    x: Tensor = _Spread.apply(y, weight, fields, grad_buffer)  # type: ignore[no-untyped-call]
    return x


def correlations(y: Tensor, x: Tensor, fields: Fields) -> Tensor:
    """weight[i, j] = y[i, j] @ x[receptive field of i, j].T."""
    weight: Tensor = _Correlations.apply(y, x, fields)  # type: ignore[no-untyped-call]
    return weight


def _weight_gradient(
    y: Tensor, x: Tensor, fields: Fields, grad_buffer: MakeBuffer | None
) -> Tensor:
    if grad_buffer is None or torch.is_grad_enabled():  # the latter: to be differentiated again
        return correlations(y, x, fields)
    return _correlate(y, x, fields, grad_buffer())


class _Responses(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, fields: Fields, grad_buffer: MakeBuffer | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fields, ctx.grad_buffer = fields, grad_buffer
        x = _in_lines(x)
        rows, columns, num_filters, _ = weight.shape
        y = x.new_empty(rows, columns, num_filters, x.shape[3])
        for row, first, num, buffer in _tiles(weight, x, fields):
            buffer.view_as(fields.view(x, row, first, num)).copy_(fields.view(x, row, first, num))
            torch.bmm(weight[row, first : first + num], buffer, out=y[row, first : first + num])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        return (
            spread(grads[0], weight, ctx.fields) if needs_x else None,
            _weight_gradient(grads[0], x, ctx.fields, ctx.grad_buffer) if needs_weight else None,
            None,
            None,
        )


class _Spread(Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, fields: Fields, grad_buffer: MakeBuffer | None
    ) -> Tensor:
        ctx.save_for_backward(y, weight)
        ctx.fields, ctx.grad_buffer = fields, grad_buffer
        y = y.contiguous()
        rows, columns, _, fan_in = weight.shape
        channels = fan_in // (fields.kernel[0] * fields.kernel[1])
        x = y.new_zeros(*fields.input_shape((rows, columns)), channels, y.shape[3])
        apart = fields.overlap()
        for row, first, num, buffer in _tiles(weight, y, fields):
            tile = slice(first, first + num)
            torch.bmm(weight[row, tile].transpose(1, 2), y[row, tile], out=buffer)
            for phase in range(min(apart, num)):
                some = buffer[phase::apart]
                target = fields.view(x, row, first + phase, len(some), every=apart)
                target.add_(some.view_as(target))
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        needs_y, needs_weight, *_ = ctx.needs_input_grad
        return (
            responses(grads[0], weight, ctx.fields) if needs_y else None,
            _weight_gradient(y, grads[0], ctx.fields, ctx.grad_buffer) if needs_weight else None,
            None,
            None,
        )


class _Correlations(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, fields: Fields) -> Tensor:
        ctx.save_for_backward(y, x)
        ctx.fields = fields
        fan_in = fields.kernel[0] * fields.kernel[1] * x.shape[2]
        return _correlate(y, x, fields, x.new_empty(*y.shape[:3], fan_in))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        y, x = ctx.saved_tensors
        needs_y, needs_x, _ = ctx.needs_input_grad
        return (
            responses(x, grads[0], ctx.fields) if needs_y else None,
            spread(y, grads[0], ctx.fields) if needs_x else None,
            None,
        )


def _correlate(y: Tensor, x: Tensor, fields: Fields, weight: Tensor) -> Tensor:
    """Writes `correlations` into a tensor."""
    x, y = _in_lines(x), y.contiguous()
    for row, first, num, buffer in _tiles(weight, x, fields):
        tile = slice(first, first + num)
        buffer.view_as(fields.view(x, row, first, num)).copy_(fields.view(x, row, first, num))
        torch.bmm(y[row, tile], buffer.transpose(1, 2), out=weight[row, tile])
    return weight


def _in_lines(x: Tensor) -> Tensor:
    """The tensor itself if each line of it is contiguous."""
    _, width, channels, batch = x.shape
    is_so = x.stride()[1:] == (channels * batch, batch, 1) and x.stride(0) >= width * x.stride(1)
    return x if is_so else x.contiguous()


def _tiles(weight: Tensor, x: Tensor, fields: Fields) -> Iterator[tuple[int, int, int, Tensor]]:
    """Row, first column and number of some neighbouring blocks, and a buffer for their fields."""
    rows, columns, _, fan_in = weight.shape
    batch = x.shape[3]
    num_threads, budget = 1, _CUDA_BUFFER_BYTES
    if not is_accelerator(x.device):
        num_threads = torch.get_num_threads()
        budget = fields.cpu_buffer_bytes * num_threads
    most = max(1, min(columns, budget // max(1, fan_in * batch * x.itemsize)))
    most = max(most // num_threads, 1) * num_threads  # as many products for each thread
    buffer = x.new_empty(most, fan_in, batch)
    for row in range(rows):
        for first in range(0, columns, most):
            num = min(most, columns - first)
            yield row, first, num, buffer[:num]
