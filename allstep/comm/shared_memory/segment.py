"""Sums over the ranks of one host, taken in memory that they share.

[Note: shared sums] A tensor goes through in pieces that fit a slot. Each rank fills its slot
with what the others need of its piece, adds up its own slice of all ranks' pieces, in the
order of ranks, and empties the others' slots of the slices that they have added up:

    fill(s)      my slot s <- all of my piece but my slice          then FILLED = s
    reduce(s)    when all are FILLED: my slice of my slot s <- sum  then REDUCED = s
    collect(s)   when all are REDUCED: my piece <- others' slices   then EMPTIED = s

These form a pipeline: in one round a rank fills a slot, reduces the one before and collects the
one before that. Slots rotate, and a slot is filled again when all have EMPTIED it. A small
tensor is filled whole and each rank adds up all of it: one wait instead of two, and the same
bits, since the order is the same.
"""

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from allstep.comm.group import WorkerGroup
from allstep.comm.shared_memory.block import Block
from allstep.comm.shared_memory.cuts import Cut, Piece, add_up
from allstep.comm.shared_memory.meeting import Meeting, meet
from allstep.comm.shared_memory.signals import (
    EMPTIED,
    FILLED,
    NUM_SUM_WORDS,
    REDUCED,
    Signals,
    lines_bytes,
)

__all__ = ["Segment"]

NUM_SLOTS = 4
SMALL_BYTES = 1 << 18
_MAX_CUTS = 256


def default_slot_bytes(num_ranks: int) -> int:
    """Pieces stay in a core's cache; where ranks take turns on a core, fewer turns pay more."""
    return 1 << 20 if num_ranks <= len(os.sched_getaffinity(0)) else 1 << 21


class Segment:
    """Memory that the CPU ranks of one host share, and the verbs that go through it.

    Args:
        meeting: where the ranks have met.
        rank: this one.
        timeout_s: tells how long a wait may take.
    """

    def __init__(self, meeting: Meeting, rank: int, timeout_s: Callable[[], float]) -> None:
        self.rank, self.size = rank, len(meeting.pids)
        lines_end = lines_bytes(self.size, NUM_SUM_WORDS)
        self._signals = Signals(meeting, rank, timeout_s, NUM_SUM_WORDS)
        self._slots = torch.frombuffer(meeting.memory, dtype=torch.uint8)[lines_end:].view(
            self.size, NUM_SLOTS, -1
        )
        self._slot_bytes = self._slots.shape[2]
        self._cuts: dict[tuple[int, int, torch.dtype], Cut] = {}
        self._num_pieces = 0
        self._is_open = True

    @classmethod
    def meet(cls, comm: WorkerGroup, slot_bytes: int | None = None) -> "Segment":
        """Maps memory that all ranks of `comm` share. Collective.

        Args:
            comm: CPU ranks of one host.
            slot_bytes: how much of a tensor is in work at once, a multiple of 64; rank 0's
                counts. None for what suits the number of ranks and of cores that it may use.

        Raises:
            NotShared: on every rank, if one of them cannot.
        """
        slot_bytes = comm.broadcast_object(slot_bytes or default_slot_bytes(comm.size))
        num_bytes = lines_bytes(comm.size, NUM_SUM_WORDS) + comm.size * NUM_SLOTS * slot_bytes
        meeting = meet(comm, num_bytes)
        return cls(meeting, comm.rank, lambda: comm.timeout_s)

    def sum_(self, flat: Tensor, divisor: int = 1) -> None:
        """flat = sum over ranks r, in their order, of flat_r / divisor; in place.

        [Note: shared sums]
        """
        if flat.nbytes <= min(SMALL_BYTES, self._slot_bytes):
            self._sum_small_(flat, divisor)
            return
        pieces = [Piece(self._cut(part, s), part, s) for s, part in self._numbered(flat)]
        # Two rounds more than pieces, for the last to come out of the pipeline.
        for filled, reduced, collected in zip(
            [*pieces, None, None], [None, *pieces, None], [None, None, *pieces], strict=True
        ):
            if filled:
                self._fill(filled)
            if reduced:
                self._reduce(reduced, divisor)
            if collected:
                self._collect(collected)

    def sum_in_place_(self, flat: Tensor, block: Block, divisor: int = 1) -> None:
        """`sum_` of tensors that lie at the same place in every rank's part of a block.

        [Note: sums in place]
        """
        self._num_pieces += 1
        s = self._num_pieces
        self._signals.set(FILLED, s)
        self._signals.wait(FILLED, s)
        chunks = block.chunks(flat)
        scratch = torch.empty_like(chunks[0][0]) if chunks else flat
        for parts in chunks:
            total = scratch[: len(parts[0])]
            add_up(parts, total, divisor)
            for part in parts:
                part.copy_(total)
        self._signals.set(REDUCED, s)
        self._signals.wait(REDUCED, s)
        self._signals.set(EMPTIED, s)

    def broadcast_(self, flat: Tensor, root: int = 0) -> None:
        """flat = flat_root, in place."""
        for s, part in self._numbered(flat):
            slot = self._cut(part, s).whole[root]
            if self.rank == root:
                self._signals.wait(EMPTIED, s - NUM_SLOTS)
                slot.copy_(part)
                self._signals.set(FILLED, s)
            else:
                self._signals.wait(FILLED, s, [root])
                part.copy_(slot)
            self._signals.set(EMPTIED, s)

    def _sum_small_(self, flat: Tensor, divisor: int) -> None:
        ((s, _),) = self._numbered(flat)
        slots = self._cut(flat, s).whole
        self._signals.wait(EMPTIED, s - NUM_SLOTS)
        slots[self.rank].copy_(flat)
        self._signals.set(FILLED, s)
        self._signals.wait(FILLED, s)
        add_up(slots, flat, divisor)
        self._signals.set(EMPTIED, s)

    def _fill(self, piece: Piece) -> None:
        self._signals.wait(EMPTIED, piece.number - NUM_SLOTS)
        for target, source in piece.to_fill:
            target.copy_(source)
        self._signals.set(FILLED, piece.number)

    def _reduce(self, piece: Piece, divisor: int) -> None:
        self._signals.wait(FILLED, piece.number)
        add_up(piece.to_add, piece.total, divisor)
        piece.own.copy_(piece.total)
        self._signals.set(REDUCED, piece.number)

    def _collect(self, piece: Piece) -> None:
        self._signals.wait(REDUCED, piece.number)
        for target, source in piece.to_collect:
            target.copy_(source)
        self._signals.set(EMPTIED, piece.number)

    def _numbered(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """Pieces that fit a slot, numbered on from the last."""
        first = self._num_pieces + 1
        if flat.nbytes <= self._slot_bytes:
            parts: Sequence[Tensor] = (flat,)
        else:
            parts = torch.split(flat, self._slot_bytes // flat.itemsize)
        self._num_pieces += len(parts)
        return list(enumerate(parts, first))

    def _cut(self, part: Tensor, s: int) -> Cut:
        """The views of piece number s's slots; made once for a length and a dtype."""
        key = (s % NUM_SLOTS, len(part), part.dtype)
        cut = self._cuts.get(key)
        if cut is None:
            if len(self._cuts) >= _MAX_CUTS:
                self._cuts.clear()
            slots = self._slots[:, key[0], : part.nbytes].view(part.dtype)
            cut = self._cuts[key] = Cut.of(slots, self.rank)
        return cut

    def close(self) -> None:
        """Tells the others that this rank takes no part any more. The memory stays mapped as
        long as a tensor looks at it.
        """
        if self._is_open:
            self._is_open = False
            self._signals.close()
