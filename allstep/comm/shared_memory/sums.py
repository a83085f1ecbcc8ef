"""Sums over the ranks of one host, in memory that they share.

[Note: shared sums] A tensor is summed in pieces that fit a slot. Each rank copies to its slot the
part of its piece that the others need, adds up its own slice of all ranks' pieces, in the order of
ranks, and copies from the others' slots the slices that they have added up:

    fill(s)      my slot s <- all of my piece but my slice          then FILLED = s
    reduce(s)    when all are FILLED: my slice of my slot s <- sum  then REDUCED = s
    collect(s)   when all are REDUCED: my piece <- others' slices   then EMPTIED = s

These form a pipeline: in one round a rank fills a slot, reduces the one before and collects the
one before that. Slots rotate, and a slot is filled again when all ranks have EMPTIED it. A small
tensor is copied as a whole and each rank adds up all of it: one wait instead of two, and the same
bits, since the order is the same.

[Note: sums in place] Tensors in a block need no slots: each rank adds up its own slice of all
ranks' tensors, in the order of ranks, and writes the sum to all of them:

    FILLED = s    my tensor is complete
    when all are FILLED: my slice of every rank's tensor <- sum      then REDUCED = s
    when all are REDUCED: my tensor is the sum

Other ranks write to a rank's tensor only between its FILLED and the last REDUCED.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allstep.comm.group import WorkerGroup
from allstep.comm.shared_memory.flags import (
    EMPTIED,
    FILLED,
    NUM_SUM_WORDS,
    REDUCED,
    Flags,
    lines_bytes,
)
from allstep.comm.shared_memory.mapping import SharedMapping, map_shared, share_memory
from allstep.env import num_cores

NUM_SLOTS = 4
SMALL_BYTES = 1 << 18
_LINE_BYTES = 64  # size of a cache line, to which only one rank writes
_CHUNK_BYTES = 1 << 18  # so that all ranks' chunks and the sum fit into a core's cache
_HALVES = (torch.float16, torch.bfloat16)
_MAX_CUTS = 256


def default_slot_bytes(num_ranks: int) -> int:
    """A size that fits a core's cache; larger if ranks share cores, for fewer switches."""
    return 1 << 20 if num_ranks <= num_cores() else 1 << 21


class Block:
    """Shared memory with a part of equal size for each CPU rank of one host.

    Args:
        comm: the ranks; all of them must make the block.
        num_bytes: size of each rank's part, the same on all ranks.

    Attributes:
        own: this rank's part, uint8; zeros at first. Tensors in it keep the memory alive.

    Raises:
        NotShared: on every rank, if one of them cannot share memory.
        DisagreementError: on every rank, if `num_bytes` differ.
    """

    def __init__(self, comm: WorkerGroup, num_bytes: int) -> None:
        memory = share_memory(comm, comm.size * num_bytes)
        self._rank = comm.rank
        self._every = torch.frombuffer(memory, dtype=torch.uint8).view(comm.size, num_bytes)
        self.own = self._every[comm.rank]
        self._chunks: dict[tuple[int, int, torch.dtype], list[list[Tensor]]] = {}

    def holds(self, flat: Tensor) -> bool:
        """Whether a tensor is in this rank's part."""
        return 0 <= self._offset(flat) < self.own.nbytes

    def chunks(self, flat: Tensor) -> list[list[Tensor]]:
        """Chunks of this rank's slice of the tensors at the offset of `flat` in every rank's part.

        For little data, making views takes longer than using them, so they are kept.
        """
        key = (self._offset(flat), flat.numel(), flat.dtype)
        if key not in self._chunks:
            start, stop = key[0], key[0] + flat.nbytes
            mine = [
                cut_in_slices(part.view(flat.dtype), len(self._every))[self._rank]
                for part in self._every[:, start:stop].unbind()
            ]
            length = _CHUNK_BYTES // flat.itemsize
            chunks = zip(*(torch.split(x, length) for x in mine), strict=True)
            self._chunks[key] = [list(chunk) for chunk in chunks if len(chunk[0])]
        return self._chunks[key]

    def _offset(self, flat: Tensor) -> int:
        return flat.data_ptr() - self.own.data_ptr()


@dataclass(frozen=True)
class Cut:
    """Views of all ranks' slots for pieces of one length and dtype.

    For little data, making views takes longer than using them, so they are kept.

    Attributes:
        rank: this rank.
        sizes: number of elements in each rank's slice.
        whole: rank -> its slot.
        slices: rank -> its slot, cut into slices.
    """

    rank: int
    sizes: list[int]
    whole: list[Tensor]
    slices: list[Sequence[Tensor]]

    @classmethod
    def of(cls, slots: Tensor, rank: int) -> "Cut":
        """Cuts slots, [size, n], into slices."""
        whole = list(slots.unbind())
        slices = [cut_in_slices(slot, len(whole)) for slot in whole]
        return cls(rank, [len(piece) for piece in slices[rank]], whole, slices)


class Piece:
    """A piece of a tensor, cut into the same slices as its slots.

    Attributes:
        number: number of the piece, counted from the buffer's first.
        own: this rank's slice of the piece.
        total: the slice of this rank's slot that its sum is written to.
        to_add: the slices to be added, by rank.
        to_fill, to_collect: (target, source) of the slices that others add up, and of those that
            they have added up.
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


class SharedBuffer:
    """Memory that the CPU ranks of one host share, and the collectives that use it.

    Args:
        mapping: the ranks' shared mapping.
        rank: this rank.
        timeout_s: function that returns the longest duration of a wait.
    """

    def __init__(self, mapping: SharedMapping, rank: int, timeout_s: Callable[[], float]) -> None:
        self.rank, self.size = rank, len(mapping.pids)
        lines_end = lines_bytes(self.size, NUM_SUM_WORDS)
        self._flags = Flags(mapping, rank, timeout_s, NUM_SUM_WORDS)
        self._slots = torch.frombuffer(mapping.memory, dtype=torch.uint8)[lines_end:].view(
            self.size, NUM_SLOTS, -1
        )
        self._slot_bytes = self._slots.shape[2]
        self._cuts: dict[tuple[int, int, torch.dtype], Cut] = {}
        self._num_pieces = 0
        self._is_open = True

    @classmethod
    def create(cls, comm: WorkerGroup, slot_bytes: int | None = None) -> "SharedBuffer":
        """Maps memory that all ranks of `comm` share. Collective.

        Args:
            comm: CPU ranks of one host.
            slot_bytes: size of the pieces that are summed at a time, a multiple of 64; rank 0's
                value counts. None for a size that suits the numbers of ranks and of rank 0's cores.

        Raises:
            NotShared: on every rank, if one of them cannot share memory.
        """
        slot_bytes = comm.broadcast_object(slot_bytes or default_slot_bytes(comm.size))
        num_bytes = lines_bytes(comm.size, NUM_SUM_WORDS) + comm.size * NUM_SLOTS * slot_bytes
        mapping = map_shared(comm, num_bytes)
        return cls(mapping, comm.rank, lambda: comm.timeout_s)

    def sum_(self, flat: Tensor) -> None:
        """flat = sum over ranks r, in their order, of flat_r; in place.

        [Note: shared sums]
        """
        if flat.nbytes <= min(SMALL_BYTES, self._slot_bytes):
            self._sum_small_(flat)
            return
        pieces = [Piece(self._cut(part, s), part, s) for s, part in self._numbered(flat)]
        # Two more rounds than pieces, until the last piece has left the pipeline.
        for filled, reduced, collected in zip(
            [*pieces, None, None], [None, *pieces, None], [None, None, *pieces], strict=True
        ):
            if filled:
                self._fill(filled)
            if reduced:
                self._reduce(reduced)
            if collected:
                self._collect(collected)

    def sum_in_place_(self, flat: Tensor, block: Block) -> None:
        """`sum_` of tensors at the same offset in every rank's part of a block.

        [Note: sums in place]
        """
        self._num_pieces += 1
        s = self._num_pieces
        self._flags.set(FILLED, s)
        self._flags.wait(FILLED, s)
        chunks = block.chunks(flat)
        scratch = torch.empty_like(chunks[0][0]) if chunks else flat
        for parts in chunks:
            total = scratch[: len(parts[0])]
            add_up(parts, total)
            for part in parts:
                part.copy_(total)
        self._flags.set(REDUCED, s)
        self._flags.wait(REDUCED, s)
        self._flags.set(EMPTIED, s)

    def broadcast_(self, flat: Tensor, root: int = 0) -> None:
        """flat = flat_root, in place."""
        for s, part in self._numbered(flat):
            slot = self._cut(part, s).whole[root]
            if self.rank == root:
                self._flags.wait(EMPTIED, s - NUM_SLOTS)
                slot.copy_(part)
                self._flags.set(FILLED, s)
            else:
                self._flags.wait(FILLED, s, [root])
                part.copy_(slot)
            self._flags.set(EMPTIED, s)

    def _sum_small_(self, flat: Tensor) -> None:
        ((s, _),) = self._numbered(flat)
        slots = self._cut(flat, s).whole
        self._flags.wait(EMPTIED, s - NUM_SLOTS)
        slots[self.rank].copy_(flat)
        self._flags.set(FILLED, s)
        self._flags.wait(FILLED, s)
        add_up(slots, flat)
        self._flags.set(EMPTIED, s)

    def _fill(self, piece: Piece) -> None:
        self._flags.wait(EMPTIED, piece.number - NUM_SLOTS)
        for target, source in piece.to_fill:
            target.copy_(source)
        self._flags.set(FILLED, piece.number)

    def _reduce(self, piece: Piece) -> None:
        self._flags.wait(FILLED, piece.number)
        add_up(piece.to_add, piece.total)
        piece.own.copy_(piece.total)
        self._flags.set(REDUCED, piece.number)

    def _collect(self, piece: Piece) -> None:
        self._flags.wait(REDUCED, piece.number)
        for target, source in piece.to_collect:
            target.copy_(source)
        self._flags.set(EMPTIED, piece.number)

    def _numbered(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """Pieces that fit a slot, numbered on from the last one."""
        first = self._num_pieces + 1
        if flat.nbytes <= self._slot_bytes:
            parts: Sequence[Tensor] = (flat,)
        else:
            parts = torch.split(flat, self._slot_bytes // flat.itemsize)
        self._num_pieces += len(parts)
        return list(enumerate(parts, first))

    def _cut(self, part: Tensor, s: int) -> Cut:
        """Views of the slots for piece number s; made once per length and dtype."""
        key = (s % NUM_SLOTS, len(part), part.dtype)
        cut = self._cuts.get(key)
        if cut is None:
            if len(self._cuts) >= _MAX_CUTS:
                self._cuts.clear()
            slots = self._slots[:, key[0], : part.nbytes].view(part.dtype)
            cut = self._cuts[key] = Cut.of(slots, self.rank)
        return cut

    def close(self) -> None:
        """Tells the others that this rank takes part no more.

        The memory stays mapped as long as a tensor uses it.
        """
        if self._is_open:
            self._is_open = False
            self._flags.close()


def cut_in_slices(flat: Tensor, num_ranks: int) -> Sequence[Tensor]:
    """A tensor's slices, one per rank, in whole cache lines; the last may be short or empty."""
    line = _LINE_BYTES // flat.itemsize
    step = -(-len(flat) // (num_ranks * line)) * line
    sizes = [min(step, max(len(flat) - r * step, 0)) for r in range(num_ranks)]
    return torch.split_with_sizes(flat, sizes)


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
