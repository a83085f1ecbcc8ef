"""Memory in which every rank's tensors lie where the others can reach them.

[Note: sums in place] What lies in a block needs no slots: each rank adds up its own slice of
all ranks' tensors, in the order of ranks, and writes the sum to all of them:

    FILLED = s    my tensor is complete
    when all are FILLED: my slice of every rank's tensor <- sum      then REDUCED = s
    when all are REDUCED: my tensor is the sum

Between a rank's FILLED and the last REDUCED the others write to its tensor; at no other time.
"""

import torch
from torch import Tensor

from allstep.comm.group import WorkerGroup
from allstep.comm.shared_memory.cuts import cut_in_slices
from allstep.comm.shared_memory.meeting import share_memory

__all__ = ["Block"]

_CHUNK_BYTES = 1 << 18  # all ranks' chunks and the sum stay in a core's cache


class Block:
    """Equally much memory for each of the CPU ranks of one host. Making it is collective.

    Args:
        comm: the ranks.
        num_bytes: for each of them, the same on all.

    Attributes:
        own: this rank's, uint8, zero at first. Tensors on it keep the memory alive.

    Raises:
        NotShared: on every rank, if one of them cannot.
        DisagreementError: on every rank, if `num_bytes` differ.
    """

    def __init__(self, comm: WorkerGroup, num_bytes: int) -> None:
        memory = share_memory(comm, comm.size * num_bytes)
        self._rank = comm.rank
        self._every = torch.frombuffer(memory, dtype=torch.uint8).view(comm.size, num_bytes)
        self.own = self._every[comm.rank]
        self._chunks: dict[tuple[int, int, torch.dtype], list[list[Tensor]]] = {}

    def holds(self, flat: Tensor) -> bool:
        """Whether a tensor lies in this rank's part."""
        return 0 <= self._offset(flat) < self.own.nbytes

    def chunks(self, flat: Tensor) -> list[list[Tensor]]:
        """This rank's slice of a tensor in its part, as chunks of every rank's tensor there.

        Making views takes longer than using them on little data, so they are kept.
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
