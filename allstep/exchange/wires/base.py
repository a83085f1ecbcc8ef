"""What a wire format is: how one bucket is summed over the workers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from allstep.exchange.layout import BucketLayout
from allstep.exchange.transport import Transport

__all__ = ["FullPrecision", "WireFormat", "WireState"]


@dataclass
class WireState:
    """What a format remembers of a bucket from one exchange to the next; part of checkpoints.

    Attributes:
        residual: what this worker has not sent yet (error feedback), as long as the bucket's
            gradients and in their unit, that of the sum; added to the next gradients. None for
            formats without.
        tensors: anything else that only speeds up or steadies the next exchange, the same on
            every worker; may be dropped when buckets change.
    """

    residual: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


class WireFormat(ABC):
    """How gradients travel; immutable, shared by all buckets."""

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
    """Sends gradients in their own dtype: float32, as a rule.

    sum = sum_r flat_r
    """

    name: ClassVar[str] = "fp32"
    is_lossless: ClassVar[bool] = True

    def sum_(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        """Makes `flat` the sum over the workers; see `WireFormat`."""
        transport.all_reduce(flat)
