"""What a loader hands out: global batches, and this worker's micro-batches of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["GlobalBatch", "MicroBatch"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model at once.

    Attributes:
        index: place in its global batch, the same whichever worker runs it.
        num_samples: in `data`.
        data: the collated samples.
        is_last: whether it is this worker's last of the global batch.
    """

    index: int
    num_samples: int
    data: Any
    is_last: bool


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """This worker's part of the samples of one optimizer step.

    Attributes:
        step: optimizer steps before this one.
        epoch: passes over the data before this one.
        num_samples: of the whole global batch, over all workers.
        micro_batches: this worker's, fetched as they are asked for; may be none.
        num_local_micro_batches: how many they are.
    """

    step: int
    epoch: int
    num_samples: int
    micro_batches: Iterator[MicroBatch]
    num_local_micro_batches: int
