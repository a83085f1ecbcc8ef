"""A tensor whose parts lie on workers, as a checkpoint takes it: no worker ever has all of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.nn.windows.window import Window


@dataclass(frozen=True)
class DividedTensor:
    """A leaf of a state. All workers of `comm` have one at the same place of theirs.

    [Note: divided checkpoints] `Checkpoints` stores it piece by piece: each worker its own pieces,
    where all see the folder; else rank 0 asks for a piece, writes it and forgets it. Who loads a
    checkpoint gets the whole tensor on the "meta" device, takes views of that by ordinary
    indexing, and receives what the views show.

    Args:
        local: this worker's part; None if it has none.
        shape: of the whole tensor.
        dtype: of all parts.
        windows: by rank, where in the whole tensor the parts lie, in the first dims or in all;
            None for a worker without a part. Workers with the same part have copies of it, and
            the first one's is stored.
        comm: the workers with the parts of one copy.
        is_first_copy: whether rank 0 of `comm` is rank 0 of all workers, who writes.

    >>> comm = Communicator.single_process()
    >>> x = DividedTensor(torch.ones(2, 3), (2, 3), torch.float32, [Window((0,), (2,))], comm)
    >>> [(rank, window.shape) for rank, window in x.pieces(max_bytes=12)]
    [(0, (1, 3)), (0, (1, 3))]
    """

    local: Tensor | None
    shape: Sequence[int]
    dtype: torch.dtype
    windows: Sequence[Window | None]
    comm: Communicator
    is_first_copy: bool = True

    @property
    def first_rank(self) -> int:
        """Of the workers that have this one's part."""
        return list(self.windows).index(self.windows[self.comm.rank])

    def pieces(self, max_bytes: int) -> Iterator[tuple[int, Window]]:
        """Rank and place of the pieces, in the order in which they travel; the same on all."""
        for rank in range(self.comm.size):
            window = self._window(rank)
            is_copy = self.windows[rank] in self.windows[:rank]
            if window is not None and window.num_positions and not is_copy:
                for piece in _cut(window, max(1, max_bytes // self.dtype.itemsize)):
                    yield rank, piece

    def piece(self, rank: int, window: Window) -> Tensor | None:
        """One of `pieces`, on rank 0 of `comm`; None elsewhere. That rank and rank 0 call it."""
        if rank != self.comm.rank:
            received: Tensor = self.comm.recv(rank)
            return received.cpu()
        part = self.local_piece(window)
        if rank == 0:
            return part
        self.comm.send(part.contiguous(), 0)
        return None

    def local_piece(self, window: Window) -> Tensor:
        """One of `pieces` that this worker has, as a view."""
        own = self._window(self.comm.rank)
        assert self.local is not None and own is not None
        return window.view(self.local.detach().resolve_conj().resolve_neg(), own, 0)

    def _window(self, rank: int) -> Window | None:
        """In all dims."""
        window = self.windows[rank]
        if window is None:
            return None
        rest = tuple(self.shape[len(window.start) :])
        return Window(window.start + (0,) * len(rest), window.stop + rest)


def _cut(window: Window, max_positions: int) -> Iterator[Window]:
    """Halves of halves, along the first dim that can be cut: pieces are near to contiguous."""
    if window.num_positions <= max_positions:
        yield window
        return
    dim = next(dim for dim, length in enumerate(window.shape) if length > 1)
    middle = (window.start[dim] + window.stop[dim]) // 2
    first_stop, second_start = list(window.stop), list(window.start)
    first_stop[dim] = second_start[dim] = middle
    yield from _cut(Window(window.start, tuple(first_stop)), max_positions)
    yield from _cut(Window(tuple(second_start), window.stop), max_positions)
