"""Parts of a worker's filters, whose gradients are joined without a copy.

[Note: gradient buffer] While its halo travels a layer computes with the filters of its inner
blocks, and then with those around them. Slices of a parameter have gradients of the parameter's
size, which autograd adds up: as many passes over the largest tensor of all as there are parts.
Here all parts write their gradient to one tensor, each in its place. What shall be differentiated
again is put together by a copy instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.nn.local_products import Fields, responses, spread

Place = tuple[slice, ...]


@dataclass(frozen=True)
class Filters:
    """A part of a weight, and the buffer for its gradient."""

    weight: Tensor
    grad_buffer: Callable[[], Tensor] | None = None

    def responses(self, x: Tensor, fields: Fields) -> Tensor:
        return responses(x, self.weight, fields, self.grad_buffer)

    def spread(self, y: Tensor, fields: Fields) -> Tensor:
        return spread(y, self.weight, fields, self.grad_buffer)


def cut_filters(weight: Tensor, places: Sequence[Place]) -> list[Filters]:
    """Divides a weight into parts. [Note: gradient buffer]"""
    if len(places) == 1:
        return [Filters(weight)]
    grad_buffer = _GradientBuffer()
    parts = _Cut.apply(weight, places, grad_buffer)  # type: ignore[no-untyped-call]
    return [
        Filters(part, partial(grad_buffer.part, weight, place))
        for part, place in zip(parts, places, strict=True)
    ]


class _GradientBuffer:
    """A buffer for a weight's gradient, to which the backward of each part writes."""

    def __init__(self) -> None:
        self._whole: Tensor | None = None

    def part(self, weight: Tensor, place: Place) -> Tensor:
        """The part of the buffer for a part's gradient."""
        if self._whole is None:
            self._whole = torch.empty_like(weight)
        return self._whole[place]

    def take(self, parts: Sequence[Tensor]) -> Tensor | None:
        """The whole gradient, if these are all its parts."""
        whole, self._whole = self._whole, None
        if whole is None or torch.is_grad_enabled():
            return None
        # By address: after `untyped_storage()` autograd would copy it to add to it.
        start, end = whole.data_ptr(), whole.data_ptr() + whole.nbytes
        is_here = (not p.numel() or start <= p.data_ptr() < end for p in parts)
        return whole if all(is_here) else None


class _Cut(Function):
    """Divides a weight; the parts' gradients are joined, not added up."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, places: Sequence[Place], grad_buffer: _GradientBuffer
    ) -> tuple[Tensor, ...]:
        ctx.places, ctx.grad_buffer = places, grad_buffer
        return tuple(weight[place] for place in places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        whole = ctx.grad_buffer.take(grads)
        if whole is None:
            whole = _Paste.apply(ctx.places, *grads)  # type: ignore[no-untyped-call]
        return whole, None, None


class _Paste(Function):
    @staticmethod
    def forward(ctx: Any, places: Sequence[Place], *parts: Tensor) -> Tensor:
        ctx.places = places
        rows, columns = (max(place[dim].stop for place in places) for dim in range(2))
        weight = parts[0].new_empty(rows, columns, *parts[0].shape[2:])
        for place, part in zip(places, parts, strict=True):
            weight[place] = part
        return weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Cut.apply(*grads, ctx.places, _GradientBuffer())  # type: ignore[no-untyped-call]
