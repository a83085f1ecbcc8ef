"""The backend's own all-reduce, and the one that sends nothing."""

from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from allstep.comm.algorithms.base import AllReduce

__all__ = ["Dummy", "Native"]


class Native(AllReduce):
    """The backend's: Gloo's on the CPU, NCCL's on CUDA.

    Neither tells what it sends; a ring's bytes are counted, 2 (size - 1) / size of the tensor's,
    the least that any algorithm can do with.
    """

    name: ClassVar[str] = "native"

    def _reduce_(self, flat: Tensor) -> None:
        size = self.comm.size
        on_wire = flat.to(self.comm.wire.carrier(flat.device))
        self.comm.wire.all_reduce(on_wire, dist.ReduceOp.SUM, "all_reduce").wait()
        if on_wire is not flat:
            flat.copy_(on_wire)
        self._messenger.count(2 * (size - 1) * flat.nbytes // size, 2 * (size - 1))


class Dummy(AllReduce):
    """Leaves every rank its own values: what is left of a step's time is not the network's."""

    name: ClassVar[str] = "dummy"

    def _reduce_(self, flat: Tensor) -> None:
        pass
