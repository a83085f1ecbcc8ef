"""What a wire format moves its payload with."""

from dataclasses import dataclass, field

from torch import Tensor

from allstep.comm import Communicator
from allstep.comm.algorithms import AllReduce

__all__ = ["Transport", "channel_of"]


@dataclass
class Transport:
    """Blocking collectives on flat payloads of equal sizes on all workers, counted.

    Attributes:
        comm: the workers.
        algorithm: how sums are taken.
        sent_bytes: handed to the wire by this worker so far.
    """

    comm: Communicator
    algorithm: AllReduce
    _moved_bytes: int = field(default=0, init=False)

    @property
    def rank(self) -> int:
        """This worker."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.comm.size

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker has sent so far."""
        return self._moved_bytes + self.algorithm.sent_bytes

    def all_reduce(self, payload: Tensor) -> None:
        """The sum over the workers, in place.

        Args:
            payload: contiguous, one dimension.
        """
        self.algorithm.reduce_(payload)

    def all_to_all(self, payload: Tensor) -> Tensor:
        """Row r goes to worker r.

        Args:
            payload: [size, n], contiguous.

        Returns:
            [size, n]: row r came from worker r.
        """
        self._moved_bytes += payload.nbytes // self.size * (self.size - 1)
        return self.comm.all_to_all_single(payload)

    def all_gather(self, payload: Tensor) -> Tensor:
        """Everyone's payload.

        Args:
            payload: [n], contiguous.

        Returns:
            [size, n]: row r came from worker r.
        """
        self._moved_bytes += payload.nbytes * (self.size - 1)
        return self.comm.all_gather_into_tensor(payload)


def channel_of(comm: Communicator) -> Communicator:
    """The same workers on connections of their own; `comm` itself for one worker, or on CUDA.

    There the stream's order keeps collectives apart, and one NCCL communicator is safer than two.
    Collective.
    """
    if comm.size == 1 or comm.device.type == "cuda":
        return comm
    channel = comm.split(0, key=comm.rank)
    assert channel is not None
    return channel
