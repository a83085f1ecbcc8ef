"""Weighted sums over windows along one dim, and their transpose; each is the other's backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def window_sums(x: Tensor, weights: Sequence[float], stride: int, dim: int) -> Tensor:
    """Weighted sums of neighbours along a dim.

    y[i] = sum over r of weights[r] * x[i * stride + r]

    Args:
        x: any shape.
        weights: one for each position of a window.
        stride: positions between two windows.
        dim: along which they are.

    >>> window_sums(torch.tensor([1.0, 2.0, 3.0, 4.0]), (1, 1), stride=1, dim=0)
    tensor([3., 5., 7.])
    """
    sums: Tensor = _Sums.apply(x, tuple(weights), stride, dim)  # type: ignore[no-untyped-call]
    return sums


class _Sums(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: tuple[float, ...], stride: int, dim: int) -> Tensor:
        ctx.arguments = (weights, stride, dim, x.shape[dim])
        total = _every(x, 0, len(weights), stride, dim) * weights[0]
        for r in range(1, len(weights)):
            total.add_(_every(x, r, len(weights), stride, dim), alpha=weights[r])
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Spread.apply(*grads, *ctx.arguments), None, None, None  # type: ignore[no-untyped-call]


class _Spread(Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weights: tuple[float, ...], stride: int, dim: int, length: int
    ) -> Tensor:
        ctx.arguments = (weights, stride, dim)
        x = y.new_zeros(_with(y.shape, dim, length))
        for r in range(len(weights)):
            _every(x, r, len(weights), stride, dim).add_(y, alpha=weights[r])
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Sums.apply(*grads, *ctx.arguments), None, None, None, None  # type: ignore[no-untyped-call]


def _every(x: Tensor, r: int, num_weights: int, stride: int, dim: int) -> Tensor:
    """The elements at position r of each window."""
    last = (x.shape[dim] - num_weights) // stride * stride
    slices = [slice(None)] * x.dim()
    slices[dim] = slice(r, r + last + 1, stride)
    return x[tuple(slices)]


def _with(shape: torch.Size, dim: int, length: int) -> list[int]:
    return [length if d == dim else n for d, n in enumerate(shape)]
