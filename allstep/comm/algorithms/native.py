"""The backend's own all-reduce, and a dummy that sends nothing."""

from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from allstep.comm.algorithms.base import AllReduce
from allstep.comm.algorithms.ring import ring_sends
from allstep.comm.work import Work


class Native(AllReduce):
    """The backend's own algorithm: Gloo's on the CPU, NCCL's on CUDA.

    Neither reports what it sends, so the bytes and messages of a ring are counted; no algorithm can
    do with fewer bytes.
    """

    name: ClassVar[str] = "native"

    def _reduce_(self, flat: Tensor) -> None:
        self.post(flat).wait()

    def post(self, flat: Tensor) -> Work[None]:
        """Starts a sum, in place, and returns at once; several may be pending.

        Args:
            flat: as in `reduce_`, on a device that the backend supports.
        """
        num_elements, num_messages = ring_sends(flat.numel(), self.comm.size, self.comm.rank)
        self._messenger.count(num_elements * flat.itemsize, num_messages)
        return self.comm.wire.all_reduce(flat, dist.ReduceOp.SUM, "all_reduce")


class Dummy(AllReduce):
    """Leaves every rank its own values, to measure a step's time without the network."""

    name: ClassVar[str] = "dummy"

    def _reduce_(self, flat: Tensor) -> None:
        pass

    def _note_meeting(self) -> None:
        """Does nothing, as ranks do not meet."""
