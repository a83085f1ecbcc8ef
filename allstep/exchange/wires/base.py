"""Wire formats, which sum a bucket over the workers, and the transport that they use."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.comm.algorithms import AllReduce
from allstep.exchange.layout import BucketLayout


@dataclass
class WireState:
    """A format's state of a bucket between exchanges; part of checkpoints.

    Attributes:
        residual: what this worker has not sent yet (error feedback), as long as the bucket's
            gradients and in their unit, that of the sum; added to the next gradients. None for
            formats without.
        tensors: anything else that only speeds up or steadies the next exchange, the same on
            every worker; may be dropped when buckets change.
    """

    residual: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Transport:
    """Blocking collectives for a format's payload, whose bytes are counted.

    Payloads are flat and of equal sizes on all workers.

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
        """This worker's rank."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.comm.size

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that this worker has sent so far."""
        return self._moved_bytes + self.algorithm.sent_bytes

    def all_reduce(self, payload: Tensor) -> None:
        """Sums over the workers, in place.

        Args:
            payload: contiguous, one dimension.
        """
        self.algorithm.reduce_(payload)

    def all_to_all(self, payload: Tensor) -> Tensor:
        """Sends row r to worker r.

        Args:
            payload: [size, n], contiguous.

        Returns:
            [size, n]: row r came from worker r.
        """
        self._moved_bytes += payload.nbytes // self.size * (self.size - 1)
        return self.comm.all_to_all_single(payload)

    def all_gather(self, payload: Tensor) -> Tensor:
        """The payloads of all workers.

        Args:
            payload: [n], contiguous.

        Returns:
            [size, n]: row r came from worker r.
        """
        self._moved_bytes += payload.nbytes * (self.size - 1)
        return self.comm.all_gather_into_tensor(payload)


class WireFormat(ABC):
    """A wire format of gradients; immutable, shared by all buckets."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype] = torch.float32  # of most of what travels
    is_lossless: ClassVar[bool] = False

    def new_state(self, layout: BucketLayout) -> WireState:
        """The state before a bucket's first exchange, the same on every worker."""
        return WireState()

    @abstractmethod
    def sum_(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        """Makes `flat` the sum over the workers, in place. Collective, blocking.

        Args:
            flat: this worker's gradients, then the tail; [num_elements + num_tail] of
                `layout.flat_dtype`. See [Note: tail] for what must hold behind the gradients.
            layout: the bucket's.
            state: the bucket's; updated in place.
            transport: the workers.
        """


@dataclass(frozen=True)
class FullPrecision(WireFormat):
    """Sends gradients in their own dtype, usually float32.

    sum = sum_r flat_r
    """

    name: ClassVar[str] = "fp32"
    is_lossless: ClassVar[bool] = True

    def sum_(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        """Makes `flat` the sum over the workers; see `WireFormat`."""
        transport.all_reduce(flat)
