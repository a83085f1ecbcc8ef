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

import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allstep.comm.shared_memory.meeting import meet
from allstep.comm.shared_memory.signals import EMPTIED, FILLED, LINE_BYTES, REDUCED, Signals

if TYPE_CHECKING:
    from allstep.comm.communicator import Communicator

__all__ = ["Segment"]

NUM_SLOTS = 4
SMALL_BYTES = 1 << 15
_HALVES = (torch.float16, torch.bfloat16)


def default_slot_bytes(num_ranks: int) -> int:
    """Pieces stay in a core's cache; where ranks take turns on a core, fewer turns pay more."""
    return 1 << 20 if num_ranks <= len(os.sched_getaffinity(0)) else 1 << 22


class Segment:
    """Memory that the CPU ranks of one host share, and the verbs that go through it.

    Args:
        memory: mapped by all ranks, zero at first.
        pids: each rank's process.
        rank: this one.
        timeout_s: how long each wait may take.
    """

    def __init__(self, memory: mmap.mmap, pids: Sequence[int], rank: int, timeout_s: float) -> None:
        self.rank, self.size = rank, len(pids)
        lines_bytes = _lines_bytes(self.size)
        self._signals = Signals(memoryview(memory)[:lines_bytes], rank, pids, timeout_s)
        self._slots = torch.frombuffer(memory, dtype=torch.uint8)[lines_bytes:].view(
            self.size, NUM_SLOTS, -1
        )
        self._sequence = 0
        self._is_open = True

    @classmethod
    def meet(cls, comm: "Communicator", slot_bytes: int | None = None) -> "Segment":
        """Maps memory that all ranks of `comm` share. Collective.

        Args:
            comm: CPU ranks of one host.
            slot_bytes: how much of a tensor is in work at once, a multiple of 64; rank 0's
                counts. None for what suits the number of ranks and of cores.

        Raises:
            NotShared: on every rank, if one of them cannot.
        """
        slot_bytes = slot_bytes or default_slot_bytes(comm.size)
        num_bytes = _lines_bytes(comm.size) + comm.size * NUM_SLOTS * slot_bytes
        meeting = meet(comm, num_bytes)
        return cls(meeting.memory, meeting.pids, comm.rank, comm.timeout_s)

    def sum_(self, flat: Tensor) -> None:
        """flat = sum over ranks r, in their order, of flat_r; in place. [Note: shared sums]"""
        if flat.nbytes <= min(SMALL_BYTES, self._slots.shape[2]):
            self._sum_small_(flat)
            return
        pieces = self._pieces(flat)
        first, last = self._sequence + 1, self._sequence + len(pieces)
        self._sequence = last
        for s in range(first, last + 3):
            if s <= last:
                self._fill(pieces[s - first], s)
            if first < s <= last + 1:
                self._reduce(pieces[s - 1 - first], s - 1)
            if first + 1 < s:
                self._collect(pieces[s - 2 - first], s - 2)

    def broadcast_(self, flat: Tensor, root: int = 0) -> None:
        """flat = flat_root, in place."""
        for piece in self._pieces(flat):
            s = self._next()
            if self.rank == root:
                self._signals.wait(EMPTIED, s - NUM_SLOTS)
                self._slot(root, s, piece).copy_(piece)
                self._signals.set(FILLED, s)
            else:
                self._signals.wait(FILLED, s, [root])
                piece.copy_(self._slot(root, s, piece))
            self._signals.set(EMPTIED, s)

    def _sum_small_(self, flat: Tensor) -> None:
        s = self._next()
        self._signals.wait(EMPTIED, s - NUM_SLOTS)
        self._slot(self.rank, s, flat).copy_(flat)
        self._signals.set(FILLED, s)
        self._signals.wait(FILLED, s)
        add_up([self._slot(r, s, flat) for r in range(self.size)], flat)
        self._signals.set(EMPTIED, s)

    def _fill(self, piece: Tensor, s: int) -> None:
        self._signals.wait(EMPTIED, s - NUM_SLOTS)
        slot = self._slot(self.rank, s, piece)
        start, stop = self._slice(piece, self.rank)
        if start:
            slot[:start].copy_(piece[:start])
        if stop < len(piece):
            slot[stop:].copy_(piece[stop:])
        self._signals.set(FILLED, s)

    def _reduce(self, piece: Tensor, s: int) -> None:
        self._signals.wait(FILLED, s)
        start, stop = self._slice(piece, self.rank)
        own = piece[start:stop]
        total = self._slot(self.rank, s, piece)[start:stop]
        parts = [
            own if r == self.rank else self._slot(r, s, piece)[start:stop] for r in range(self.size)
        ]
        add_up(parts, total)
        own.copy_(total)
        self._signals.set(REDUCED, s)

    def _collect(self, piece: Tensor, s: int) -> None:
        self._signals.wait(REDUCED, s)
        for r in range(self.size):
            if r != self.rank:
                start, stop = self._slice(piece, r)
                piece[start:stop].copy_(self._slot(r, s, piece)[start:stop])
        self._signals.set(EMPTIED, s)

    def _pieces(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split(flat, self._slots.shape[2] // flat.itemsize)

    def _slot(self, rank: int, s: int, piece: Tensor) -> Tensor:
        """A rank's slot for piece number s."""
        return self._slots[rank, s % NUM_SLOTS, : piece.nbytes].view(piece.dtype)

    def _slice(self, piece: Tensor, rank: int) -> tuple[int, int]:
        """Where a rank's part of a piece starts and stops; no two share a cache line."""
        line = 64 // piece.itemsize
        step = -(-len(piece) // (self.size * line)) * line
        return min(rank * step, len(piece)), min((rank + 1) * step, len(piece))

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def close(self) -> None:
        """Tells the others that this rank takes no part any more. The memory stays mapped as
        long as a tensor looks at it.
        """
        if self._is_open:
            self._is_open = False
            self._signals.close()


def add_up(parts: Sequence[Tensor], total: Tensor) -> None:
    """total = parts[0] + parts[1] + ..., in this order; half precision in float32."""
    if total.dtype in _HALVES:
        accumulator = parts[0].float()
        for part in parts[1:]:
            accumulator.add_(part)
        total.copy_(accumulator)
        return
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)


def _lines_bytes(num_ranks: int) -> int:
    """Of all ranks' counters, in whole pages."""
    return -(-num_ranks * LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
