"""Which sample is in which micro-batch, and which worker runs it, in integers."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from allstep.data.random import derive_permutation
from allstep.errors import UsageError, check_integer, check_multiple


def check_batches(global_batch: int, micro_batch: int) -> None:
    """Raises UsageError unless global batches can be cut in whole micro-batches."""
    check_integer("global_batch", global_batch)
    check_integer("micro_batch", micro_batch)
    check_multiple("global_batch", global_batch, "micro_batch", micro_batch)


def local_part(num_micro_batches: int, rank: int, size: int) -> range:
    """The micro-batches that a worker runs: a contiguous block, of nearly equal sizes.

    >>> [list(local_part(4, rank, 3)) for rank in range(3)]
    [[0], [1], [2, 3]]
    """
    return range(rank * num_micro_batches // size, (rank + 1) * num_micro_batches // size)


@dataclass(frozen=True, slots=True)
class GlobalBatchPlan:
    """Where the samples of one optimizer step lie in their epoch.

    Attributes:
        epoch: passes over the data before this one.
        offset: samples of the epoch before this batch.
        num_samples: of the batch.
        num_micro_batches: that it is cut in; the last may be short.
        next_position: samples consumed once this batch is done, over all epochs.
    """

    epoch: int
    offset: int
    num_samples: int
    num_micro_batches: int
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
        # Loaders that read ahead ask for the next epoch's while this one's is still in use.
        self._order = lru_cache(maxsize=2)(self._make_order)

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
