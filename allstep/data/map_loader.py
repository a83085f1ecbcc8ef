"""Loads the global batches of a map-style data set."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Dataset

from allstep.comm import Communicator
from allstep.data.batches import BatchingOptions, GlobalBatch, GlobalBatchLoader, MicroBatch
from allstep.data.fetch import FetchMicroBatch, Key
from allstep.data.processes import Items
from allstep.data.same_data import first_samples
from allstep.data.sampler import GlobalBatchPlan, GlobalBatchSampler
from allstep.data.shares import Shares
from allstep.errors import UsageError


class MapLoader(GlobalBatchLoader):
    """The loader of a map-style data set; see `allstep.data.loader`.

    [Note: reading ahead] Loader processes are given one endless sequence of micro-batches to read,
    so that those of the next epoch are ready when it begins. `position` counts samples that were
    yielded, not those that were read ahead; a loader that is set to another position starts new
    processes.

    Attributes:
        position: number of samples consumed so far, over all epochs.
    """

    def __init__(
        self, dataset: Dataset[Any], comm: Communicator, options: BatchingOptions, *, shuffle: bool
    ) -> None:
        super().__init__(comm, options)
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise UsageError(
                f"`dataset` (a {type(dataset).__name__}) has no `__len__` and `__getitem__`; give"
                " a map-style set, or an IterableDataset for a stream."
            )
        self._sampler = GlobalBatchSampler(
            len(dataset),
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            seed=self.seed,
            shuffle=shuffle,
            drop_last=options.drop_last,
        )
        self._dataset = dataset
        self._fetch = FetchMicroBatch(dataset, self.seed, options.collate_fn, tells_epoch=True)
        self._rest: Iterator[MicroBatch] = iter(())  # the rest of the batch that was yielded last
        self.position = 0

    def __len__(self) -> int:
        """Number of global batches per epoch."""
        return len(self._sampler)

    @property
    def epoch(self) -> int:
        """Number of whole passes over the data so far."""
        return self._sampler.epoch(self.position)

    def options(self) -> dict[str, Any]:
        """The options that determine each step's samples; a position is valid for equal options."""
        own = {"num_samples": self._sampler.num_samples, "shuffle": self._sampler.shuffle}
        return super().options() | own

    def first_samples(self) -> list[tuple[str, str]]:
        """The samples that workers compare, as pairs (name, hash or other description)."""
        self._fetch.forget_epoch()
        return first_samples(self._dataset, self._processes, self.seed, tells_epoch=True)

    def state_dict(self) -> dict[str, int]:
        """The position in the data: numbers of `samples` and `steps` since the start."""
        return {"samples": self.position, "steps": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues from a `state_dict`, made with any number of workers and any global batch.

        Raises:
            UsageError: if a key is missing or a value is impossible.
        """
        self._check_state(state, "samples", "steps")
        self.close()
        self.position = self._sampler.settle(state["samples"])
        self.step = state["steps"]

    def close(self) -> None:
        """Ends the loader's processes; new ones are started when more batches are requested."""
        self._rest = iter(())
        super().close()

    def _next_batch(self) -> GlobalBatch:
        for _ in self._rest:  # discards what the caller did not consume, to stay in order
            pass
        plan = self._sampler.plan(self.position)
        part = self.shares.parts(plan.num_micro_batches)[self.comm.rank]
        if part and self._items is None:
            keys = _keys(self._sampler, self.position, self.shares, self.comm.rank)
            self._items = self._processes.start(self._fetch, keys, seed=self.seed)
        self._rest = self._micro_batches(plan, part, self._items)
        step, position = self.step, self.position
        self.step, self.position = step + 1, plan.next_position
        return GlobalBatch(
            step,
            plan.epoch,
            plan.num_samples,
            self._rest,
            len(part),
            plan.num_micro_batches,
            position,
        )

    def _micro_batches(
        self, plan: GlobalBatchPlan, part: range, items: Items | None
    ) -> Iterator[MicroBatch]:
        is_whole = False
        try:
            for index in part:
                assert items is not None
                start = index * self.micro_batch
                num_samples = min(self.micro_batch, plan.num_samples - start)
                yield MicroBatch(index, num_samples, next(items), index == part[-1])
            is_whole = True
        finally:
            if not is_whole and items is self._items:  # after an error, items would be shifted
                self.close()

    def _may_end_short(self) -> bool:
        left = self._sampler.num_samples - self.position % self._sampler.num_samples
        return not self._drop_last and left % self.global_batch != 0


def _keys(sampler: GlobalBatchSampler, position: int, shares: Shares, rank: int) -> Iterator[Key]:
    """The micro-batches that a worker fetches from `position` on; see [Note: reading ahead]."""
    while True:
        plan = sampler.plan(position)
        for index in shares.parts(plan.num_micro_batches)[rank]:
            yield plan.epoch, sampler.indices(plan, index)
        position = plan.next_position
