"""Sparse gradients: only the largest elements."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from allstep.device import is_accelerator
from allstep.errors import check_share
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires.base import Transport, WireState
from allstep.exchange.wires.error_feedback import LossyFormat, keep_unsent, with_residual

_SAMPLE = 1 << 14


@dataclass(frozen=True)
class TopK(LossyFormat):
    """Sends the largest elements of each bucket, and their indices; the rest is sent later.

    v_r = gradient_r + residual_r
    sum = sum_r top(v_r),  residual_r = v_r - top(v_r)

    where top(v) keeps the ceil(fraction * elements) largest |v|. Each worker sends 8 bytes for
    each of them to every other, so the bytes grow with the number of workers.
    See [Note: error feedback].

    |error| <= sum_r |v_r - top(v_r)|, each at most min_i |top(v_r)_i|

    Args:
        fraction: of a bucket's elements, above 0 and at most 1.
        error_feedback: False forgets what was not sent.

    Raises:
        UsageError: if `fraction` is out of range.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP
    2017, arXiv:1704.05021; Stich et al., 2018, arXiv:1809.07599.
    """

    fraction: float = 0.01
    error_feedback: bool = True

    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        check_share("fraction", self.fraction, "(0, 1]", "0.01 is usual")

    def _sum(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        n = layout.num_elements
        wanted = with_residual(flat, layout, state)
        indices = _largest(wanted.abs(), min(n, ceil(self.fraction * n)))
        values = wanted[indices]
        wanted[indices] = values - values  # zero, or NaN for what isn't finite
        keep_unsent(state, wanted)

        message = _pack(values, indices, flat[n:])
        total = wanted.zero_()
        tail = flat.new_zeros(layout.num_tail)
        for row in transport.all_gather(message):
            values, indices, their_tail = _unpack(row, len(indices), wanted.dtype)
            total.index_add_(0, indices, values)
            tail += their_tail
        flat[:n] = total
        flat[n:] = tail


def _largest(x: Tensor, count: int) -> Tensor:
    """The indices of the largest elements; nonfinite ones count as larger than all others.

    On the CPU `topk` of all takes many times as long as one of candidates, which a sample of
    the elements finds.
    """
    stride = x.numel() // _SAMPLE
    if not is_accelerator(x.device) and stride > 1:
        sample = x[::stride]
        likely = min(len(sample), 64 + 2 * count * len(sample) // x.numel())
        candidates = (x < sample.topk(likely, sorted=False).values.amin()).logical_not_()
        found = candidates.nonzero().view(-1)
        if len(found) >= count:
            return found[x[found].topk(count, sorted=False).indices]
    return x.topk(count, sorted=False).indices


def _pack(values: Tensor, indices: Tensor, tail: Tensor) -> Tensor:
    """Encodes indices and values as one row of bytes."""
    pieces = (values, indices.to(torch.int32), tail.to(torch.int8))
    return torch.cat([piece.view(torch.uint8) for piece in pieces])


def _unpack(row: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `_pack`."""
    values, indices, tail = row.split_with_sizes(
        [count * dtype.itemsize, count * 4, len(row) - count * (dtype.itemsize + 4)]
    )
    return (
        values.clone().view(dtype),  # a copy is aligned
        indices.clone().view(torch.int32),
        tail.view(torch.int8),
    )
