"""How pieces and slots are cut in slices, one a rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cut", "Piece", "add_up", "cut_in_slices"]

_LINE_BYTES = 64  # no two ranks write to one cache line
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Cut:
    """All ranks' slots for pieces of one length and dtype.

    Making views takes longer than using them on little data, so they are kept.

    Attributes:
        rank: this one.
        sizes: elements in each rank's slice.
        whole: rank -> its slot.
        slices: rank -> its slot, cut in slices.
    """

    rank: int
    sizes: list[int]
    whole: list[Tensor]
    slices: list[Sequence[Tensor]]

    @classmethod
    def of(cls, slots: Tensor, rank: int) -> "Cut":
        """Cuts slots, [size, n]."""
        whole = list(slots.unbind())
        slices = [cut_in_slices(slot, len(whole)) for slot in whole]
        return cls(rank, [len(piece) for piece in slices[rank]], whole, slices)


class Piece:
    """A piece of a tensor, cut as its slots are.

    Attributes:
        number: of the piece, counted from the segment's first.
        own: this rank's slice of the tensor.
        total: where its sum goes in this rank's slot.
        to_add: what it is the sum of, by rank.
        to_fill, to_collect: (target, source) of what others add up, and of what they have.
    """

    def __init__(self, cut: Cut, part: Tensor, number: int) -> None:
        rank, slices = cut.rank, cut.slices
        mine = torch.split_with_sizes(part, cut.sizes)
        others = [other for other in range(len(mine)) if other != rank]
        self.number = number
        self.own = mine[rank]
        self.total = slices[rank][rank]
        self.to_add = [slot[rank] for slot in slices]
        self.to_add[rank] = self.own
        self.to_fill = [(slices[rank][other], mine[other]) for other in others]
        self.to_collect = [(mine[other], slices[other][other]) for other in others]


def cut_in_slices(flat: Tensor, num_ranks: int) -> Sequence[Tensor]:
    """A tensor's slices, one a rank, in whole cache lines; the last ones may be short or empty."""
    line = _LINE_BYTES // flat.itemsize
    step = -(-len(flat) // (num_ranks * line)) * line
    sizes = [min(step, max(len(flat) - r * step, 0)) for r in range(num_ranks)]
    return torch.split_with_sizes(flat, sizes)


def add_up(parts: Sequence[Tensor], total: Tensor, divisor: int = 1) -> None:
    """total = (parts[0] + parts[1] + ...) / divisor, in this order; half precision in float32."""
    if total.dtype in _HALVES:
        accumulator = parts[0].float()
        for part in parts[1:]:
            accumulator.add_(part)
        total.copy_(accumulator.div_(divisor) if divisor != 1 else accumulator)
        return
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
    if divisor != 1:
        total.div_(divisor)
