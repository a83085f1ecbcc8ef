"""The all-reduce of CPU ranks that share memory."""

from typing import ClassVar
from weakref import WeakValueDictionary

from torch import Tensor

from allstep.comm.algorithms.base import AllReduce
from allstep.comm.algorithms.native import Native
from allstep.comm.group import WorkerGroup
from allstep.comm.shared_memory import Block, NotShared, SharedBuffer


class SharedMemory(AllReduce):
    """Sums in memory that the CPU ranks of one host share; elsewhere the backend's own algorithm.

    Nothing goes over the wire, so `sent_bytes` stays 0. Each rank adds in the order of ranks, half
    precision in float32. If memory cannot be shared, the first rank logs why, once, and `fallback`
    takes the sums.

    Args:
        comm: the workers.
        slot_bytes: size of the pieces of a tensor that are summed at a time, a multiple of 64; None
            for a size that suits the numbers of ranks and cores.

    Attributes:
        fallback: the algorithm that is used instead; None if memory is shared.
    """

    name: ClassVar[str] = "shared_memory"

    def __init__(self, comm: WorkerGroup, slot_bytes: int | None = None) -> None:
        super().__init__(comm)
        self.fallback: AllReduce | None = None
        self._buffer: SharedBuffer | None = None
        self._blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
        if comm.size == 1:
            return
        try:
            self._buffer = SharedBuffer.create(comm, slot_bytes)
        except NotShared as reason:
            self.fallback = Native(comm)
            reason.tell(comm.rank, "all-reduces use the network, not shared memory")

    def new_block(self, num_bytes: int) -> Block | None:
        """Allocates memory in which sums are taken in place. Collective.

        Tensors at the same offset in every rank's part are summed without being copied. Keep a
        reference to the block for as long as its tensors are summed.

        Args:
            num_bytes: size of each rank's part, the same on all ranks.

        Returns:
            The block; None if the ranks share no memory, or too little.
        """
        if self._buffer is None:
            return None
        try:
            block = Block(self.comm, num_bytes)
        except NotShared as reason:
            reason.tell(self.comm.rank, "gradients are copied to be summed")
            return None
        self._blocks[id(block)] = block
        return block

    def _reduce_(self, flat: Tensor) -> None:
        if self.fallback is not None:
            self.fallback.reduce_(flat)
            return
        assert self._buffer is not None
        for reference in self._blocks.valuerefs():
            block = reference()
            if block is not None and block.holds(flat):
                self._buffer.sum_in_place_(flat, block)
                return
        self._buffer.sum_(flat)

    @property
    def _parts(self) -> tuple[AllReduce, ...]:
        return (self.fallback,) if self.fallback else ()

    def close(self) -> None:
        super().close()
        if self._buffer is not None:
            self._buffer.close()
