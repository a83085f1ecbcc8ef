"""Which sample is in which micro-batch, and which worker runs it: integers alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from allstep.data.random import derive_seed
from allstep.errors import UsageError, nearest_multiples

__all__ = ["GlobalBatchPlan", "GlobalBatchSampler", "MicroBatchPlan", "check_batches", "local_part"]


def check_batches(global_batch: int, micro_batch: int) -> None:
    """Raises UsageError unless global batches can be cut in whole micro-batches."""
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch)):
        if value < 1:
            raise UsageError(f"`{name}` (={value}) must be at least 1.")
    if global_batch % micro_batch:
        raise UsageError(
            f"`global_batch` (={global_batch}) must be a multiple of `micro_batch`"
            f" (={micro_batch}); nearest: {nearest_multiples(global_batch, micro_batch)}."
        )


def local_part(num_micro_batches: int, rank: int, size: int) -> range:
    """The micro-batches that a worker runs: a contiguous block, of nearly equal sizes.

    >>> [list(local_part(4, rank, 3)) for rank in range(3)]
    [[0], [1], [2, 3]]
    """
    return range(rank * num_micro_batches // size, (rank + 1) * num_micro_batches // size)


@dataclass(frozen=True)
class MicroBatchPlan:
    """Samples that go through the model at once.

    Attributes:
        index: place in its global batch, from 0.
        indices: of the samples in the data set.
    """

    index: int
    indices: NDArray[np.int64]


@dataclass(frozen=True)
class GlobalBatchPlan:
    """Samples of one optimizer step.

    Attributes:
        epoch: passes over the data before this one.
        num_samples: in all of its micro-batches.
        micro_batches: in order, whichever workers run them.
        next_position: samples consumed once this batch is done.
    """

    epoch: int
    num_samples: int
    micro_batches: Sequence[MicroBatchPlan]
    next_position: int


class GlobalBatchSampler:
    """Cuts epochs in global batches, and those in micro-batches, the same for all workers.

    A position is the number of samples consumed since the start, over all epochs:

        epoch = position // num_samples,  offset = position % num_samples

    so that a run can go on from it with other workers, or with another global batch.

    Args:
        num_samples: in the data set.
        global_batch: samples of one optimizer step.
        micro_batch: samples that go through the model at once; divides `global_batch`.
        seed: of the epochs' permutations.
        shuffle: another order in each epoch, instead of the data set's own.
        drop_last: skip an epoch's last incomplete global batch; it counts as consumed.

    Raises:
        UsageError: if there are no samples, or if the batches don't fit.

    >>> sampler = GlobalBatchSampler(10, global_batch=4, micro_batch=2, shuffle=False)
    >>> [micro_batch.indices.tolist() for micro_batch in sampler.plan(8).micro_batches]
    [[8, 9]]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        check_batches(global_batch, micro_batch)
        if num_samples < 1:
            raise UsageError("`dataset` is empty: there is nothing to train on.")
        if drop_last and num_samples < global_batch:
            raise UsageError(
                f"`global_batch` (={global_batch}) is larger than `dataset` ({num_samples}"
                " samples) and `drop_last` drops what is left; lower it or keep the last batch."
            )
        self.num_samples = num_samples
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._permutation = lru_cache(maxsize=1)(self._permute)

    def __len__(self) -> int:
        """Global batches of an epoch."""
        whole, rest = divmod(self.num_samples, self._global_batch)
        return whole if self._drop_last or not rest else whole + 1

    def epoch(self, position: int) -> int:
        """Whole passes over the data before `position`."""
        return position // self.num_samples

    def settle(self, position: int) -> int:
        """`position`, or the next epoch's start if what is left of the epoch is dropped."""
        left = self.num_samples - position % self.num_samples
        return position + left if self._drop_last and left < self._global_batch else position

    def plan(self, position: int) -> GlobalBatchPlan:
        """The global batch that starts at a settled `position`."""
        epoch, offset = divmod(position, self.num_samples)
        indices = self._permutation(epoch)[offset : offset + self._global_batch]
        micro_batches = [
            MicroBatchPlan(start // self._micro_batch, indices[start : start + self._micro_batch])
            for start in range(0, len(indices), self._micro_batch)
        ]
        next_position = self.settle(position + len(indices))
        return GlobalBatchPlan(epoch, len(indices), micro_batches, next_position)

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self.num_samples)
        generator = np.random.Generator(np.random.PCG64(derive_seed(self._seed, epoch)))
        return generator.permutation(self.num_samples)
