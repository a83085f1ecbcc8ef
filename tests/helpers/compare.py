"""Comparisons of lists of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["equal", "largest_difference"]


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Relative to the larger of 1 and the second's values."""
    return max(
        float(((x - y).abs() / y.abs().clamp(min=1)).detach().max())
        for x, y in zip(first, second, strict=True)
    )
