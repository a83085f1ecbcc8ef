"""Assigns samples to micro-batches and these to workers, by integer arithmetic only."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from allstep.data.random import derive_permutation
from allstep.errors import UsageError, check_integer, check_multiple


def check_batches(global_batch: int, micro_batch: int) -> None:
    """Raises UsageError unless a global batch consists of whole micro-batches."""
    check_integer("global_batch", global_batch)
    check_integer("micro_batch", micro_batch)
    check_multiple("global_batch", global_batch, "micro_batch", micro_batch)


def local_part(num_micro_batches: int, rank: int, size: int) -> range:
    """The micro-batches of a worker: contiguous blocks of nearly the same size for all workers.

    >>> [list(local_part(4, rank, 3)) for rank in range(3)]
    [[0], [1], [2, 3]]
    """
    return range(rank * num_micro_batches // size, (rank + 1) * num_micro_batches // size)


@dataclass(frozen=True, slots=True)
class GlobalBatchPlan:
    """The place of a global batch in its epoch, and its size.

    Attributes:
        epoch: number of passes over the data before this one.
        offset: number of samples of the epoch before this batch.
        num_samples: samples of the batch.
        num_micro_batches: micro-batches of the batch; the last may be short.
        next_position: number of samples consumed after this batch, over all epochs.
    """

    epoch: int
    offset: int
    num_samples: int
    num_micro_batches: int
    next_position: int


class GlobalBatchSampler:
    """Divides epochs into global batches, and these into micro-batches, the same for all workers.

    A position is the number of samples consumed since the start, over all epochs:

        epoch = position // num_samples,  offset = position % num_samples

    so that a run can continue from it with other workers, or with another global batch.

    Args:
        num_samples: samples of the data set.
        global_batch: samples of one optimizer step.
        micro_batch: samples of one pass through the model; divides `global_batch`.
        seed: seed of the epochs' permutations.
        shuffle: whether each epoch has a different order, instead of the data set's own.
        drop_last: skip an epoch's last incomplete global batch; it counts as consumed.

    Raises:
        UsageError: if there are no samples, or if the batches don't fit.

    >>> sampler = GlobalBatchSampler(10, global_batch=4, micro_batch=2, seed=3)
    >>> plan = sampler.plan(4)
    >>> [sampler.indices(plan, index) for index in range(plan.num_micro_batches)]
    [array([7, 3]), array([8, 4])]
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
        self.shuffle = shuffle
        self._drop_last = drop_last
        # Loaders that read ahead need the next epoch's order while this one's is still in use.
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        """Number of global batches per epoch."""
        whole, rest = divmod(self.num_samples, self._global_batch)
        return whole if self._drop_last or not rest else whole + 1

    def epoch(self, position: int) -> int:
        """Number of whole passes over the data before `position`."""
        return position // self.num_samples

    def settle(self, position: int) -> int:
        """`position`, or the next epoch's start if the rest of the epoch is dropped."""
        left = self.num_samples - position % self.num_samples
        return position + left if self._drop_last and left < self._global_batch else position

    def plan(self, position: int) -> GlobalBatchPlan:
        """The global batch that starts at a settled `position`."""
        epoch, offset = divmod(position, self.num_samples)
        num_samples = min(self._global_batch, self.num_samples - offset)
        return GlobalBatchPlan(
            epoch,
            offset,
            num_samples,
            num_micro_batches=-(-num_samples // self._micro_batch),
            next_position=self.settle(position + num_samples),
        )

    def indices(self, plan: GlobalBatchPlan, micro_batch_index: int) -> NDArray[np.int64]:
        """The samples of one micro-batch, as indices into the data set."""
        start = plan.offset + micro_batch_index * self._micro_batch
        end = min(start + self._micro_batch, plan.offset + plan.num_samples)
        return self._order(plan.epoch)[start:end]

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.num_samples)
        return derive_permutation(self.num_samples, self._seed, epoch)
