"""Global batches of a map-style data set."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Self, cast

from torch.utils.data import Dataset

from allstep.comm import Communicator
from allstep.data.batches import GlobalBatch, MicroBatch
from allstep.data.fetch import Collate, FetchMicroBatch, Key
from allstep.data.processes import LoaderProcesses
from allstep.data.sampler import GlobalBatchPlan, GlobalBatchSampler, MicroBatchPlan, local_part
from allstep.errors import UsageError

__all__ = ["MapLoader"]


class MapLoader:
    """Hands out this worker's part of each global batch; see `allstep.data.loader`.

    Attributes:
        comm: the workers that share the data.
        global_batch, micro_batch: samples of a step, and of a pass through the model.
        seed: start of all random states.
        step: global batches handed out so far, over all epochs.
        position: samples consumed so far, over all epochs.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        comm: Communicator,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        collate_fn: Collate | None,
        processes: LoaderProcesses,
    ) -> None:
        self.comm = comm
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seed = seed
        self.step = 0
        self.position = 0
        self._drop_last = drop_last
        self._sampler = GlobalBatchSampler(
            len(cast(Sized, dataset)),
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        fetch = FetchMicroBatch(dataset, seed, collate_fn)
        self._loader = processes.loader(fetch, _Keys(self), persistent=True)

    def __len__(self) -> int:
        """Global batches of an epoch."""
        return len(self._sampler)

    @property
    def epoch(self) -> int:
        """Whole passes over the data so far."""
        return self._sampler.epoch(self.position)

    def global_batches(self) -> Iterator[GlobalBatch]:
        """The rest of the current epoch; a batch counts as consumed when it is handed out."""
        epoch = self.epoch
        items = iter(self._loader)
        while self.epoch == epoch:
            plan = self._sampler.plan(self.position)
            local = self._local(plan)
            micro_batches = _fetched(items, local)
            step, self.step, self.position = self.step, self.step + 1, plan.next_position
            yield GlobalBatch(step, plan.epoch, plan.num_samples, micro_batches, len(local))
            for _ in micro_batches:  # what was not asked for, so that the order is kept
                pass

    def __iter__(self) -> Iterator[Any]:
        """This worker's micro-batches, for a plain loop of one micro-batch per worker and step.

        Raises:
            UsageError: if the workers' shares of a global batch would be unequal.
        """
        size, left = self.comm.size, self._sampler.num_samples % self.global_batch
        if self.global_batch != size * self.micro_batch:
            raise UsageError(
                f"`global_batch` (={self.global_batch}) must be {size} workers x `micro_batch`"
                f" (={self.micro_batch}) = {size * self.micro_batch} for a plain loop;"
                " `allstep.steps` takes any."
            )
        if size > 1 and left and not self._drop_last:
            raise UsageError(
                f"An epoch's last global batch has {left} of {self.global_batch} samples, so"
                " that a plain loop would weigh workers wrongly; use `allstep.steps`, or"
                " `drop_last=True`."
            )
        return (micro.data for batch in self.global_batches() for micro in batch.micro_batches)

    def state_dict(self) -> dict[str, int]:
        """Where the data stands: samples consumed and steps made since the start."""
        return {"samples": self.position, "steps": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from a `state_dict`, made with any number of workers.

        Raises:
            UsageError: if the state has no such keys, or impossible values.
        """
        for key in ("samples", "steps"):
            if state.get(key, -1) < 0:
                raise UsageError(
                    f"`state` (={dict(state)}) has no valid `{key}`; give what `state_dict` gave."
                )
        self.position = self._sampler.settle(state["samples"])
        self.step = state["steps"]

    def close(self) -> None:
        """Ends the loader's processes."""
        iterator = self._loader._iterator
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        self._loader._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def local_keys(self, position: int) -> Iterator[Key]:
        """What this worker fetches from `position` to the epoch's end, in order."""
        epoch = self._sampler.epoch(position)
        while self._sampler.epoch(position) == epoch:
            plan = self._sampler.plan(position)
            for micro_batch in self._local(plan):
                yield plan.epoch, micro_batch.indices.tolist()
            position = plan.next_position

    def _local(self, plan: GlobalBatchPlan) -> Sequence[MicroBatchPlan]:
        part = local_part(len(plan.micro_batches), self.comm.rank, self.comm.size)
        return plan.micro_batches[part.start : part.stop]


class _Keys:
    """A sampler for DataLoader, which asks for an iterator when an epoch begins."""

    def __init__(self, loader: MapLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Key]:
        return self._loader.local_keys(self._loader.position)


def _fetched(items: Iterator[Any], plans: Sequence[MicroBatchPlan]) -> Iterator[MicroBatch]:
    for plan in plans:
        yield MicroBatch(plan.index, len(plan.indices), next(items), plan is plans[-1])
