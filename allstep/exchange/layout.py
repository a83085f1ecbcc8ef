"""The layout of several parameters' gradients in one flat tensor."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class BucketLayout:
    """A bucket's layout: parameters of one dtype and device, one after the other.

    Behind the parameters' gradients is a tail of small whole numbers, with which workers compare
    their exchanges. [Note: tail] Whatever a wire format does to gradients, a sum of tails must be
    zero exactly where the workers' numbers cancel exactly, and nowhere else.

    Attributes:
        names: the parameters' names.
        shapes: the parameters' shapes.
        strides: the gradients' strides, in the parameters' memory order.
        dtype: the parameters' dtype; the flat tensor holds a complex number as two reals.
        device: the parameters' device.
        num_tail: number of elements behind the gradients.
        alignment: each parameter begins at a multiple of so many elements, with zeros before it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    num_tail: int = 0
    alignment: int = 1

    @classmethod
    def of(
        cls,
        parameters: Sequence[tuple[str, nn.Parameter]],
        num_tail: int = 0,
        alignment: int = 1,
    ) -> "BucketLayout":
        """The layout of parameters of one dtype and device."""
        (dtype,) = {p.dtype for _, p in parameters}
        (device,) = {p.device for _, p in parameters}
        return cls(
            tuple(name for name, _ in parameters),
            tuple(tuple(p.shape) for _, p in parameters),
            tuple(_dense_strides(p) for _, p in parameters),
            dtype,
            device,
            num_tail,
            alignment,
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.names, self.shapes, self.dtype))

    @cached_property
    def name_set(self) -> frozenset[str]:
        """The names as a set."""
        return frozenset(self.names)

    @property
    def flat_dtype(self) -> torch.dtype:
        """The dtype of the flat tensor."""
        return self.dtype.to_real()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of the flat tensor for each parameter."""
        width = 2 if self.dtype.is_complex else 1
        return tuple(width * torch.Size(shape).numel() for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each parameter."""
        return self._bounds[:-1]

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """The offset of each parameter, and the end of the last one."""
        step = self.alignment
        return tuple(accumulate((-(-size // step) * step for size in self.sizes), initial=0))

    def name_at(self, element: int) -> str:
        """The parameter whose gradient holds an element of the flat tensor."""
        holders = [i for i, size in enumerate(self.sizes) if size]
        starts = [self.offsets[i] for i in holders]
        return self.names[holders[bisect_right(starts, element) - 1]]

    @cached_property
    def num_elements(self) -> int:
        """Number of elements of all gradients and the gaps between them, without the tail."""
        return self._bounds[-1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the flat tensor: gradients and tail."""
        return (self.num_elements + self.num_tail) * self.flat_dtype.itemsize

    def new_flat(self) -> Tensor:
        """A zero flat tensor: gradients and tail."""
        size = self.num_elements + self.num_tail
        return torch.zeros(size, dtype=self.flat_dtype, device=self.device)

    def pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The parameters' elements as slices of a flat tensor, with or without a tail."""
        members = zip(self.offsets, self.sizes, strict=True)
        return tuple(flat[offset : offset + size] for offset, size in members)

    def without_gaps(self, flat: Tensor) -> Tensor:
        """The parameters' elements without the gaps, the same on any device."""
        return flat[: self.num_elements] if self.alignment == 1 else torch.cat(self.pieces(flat))

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The gradients as views of the flat tensor, in the parameters' shapes and strides."""
        views = []
        for piece, shape, strides in zip(self.pieces(flat), self.shapes, self.strides, strict=True):
            if self.dtype.is_complex:
                piece = torch.view_as_complex(piece.view(-1, 2))
            views.append(piece.as_strided(shape, strides))
        return tuple(views)


def _dense_strides(p: Tensor) -> tuple[int, ...]:
    """The parameter's strides if they are dense, else those of its contiguous copy."""
    return torch.empty_like(p, device="meta").stride()
