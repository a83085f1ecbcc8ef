"""Global batches of streams (iterable data sets), which end when they end.

[Note: end of data]
Nobody knows how long a stream is, and with a stream for each worker they end at different
moments. So for every global batch the workers all-reduce how many samples they have for it.
Those whose stream has ended take part with none; the epoch ends where the sum is zero. The
all-reduce of a batch is started one batch ahead, so that no step waits for it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from allstep.comm import Communicator, Pending
from allstep.data.batches import GlobalBatch, MicroBatch
from allstep.data.fetch import Collate
from allstep.data.processes import LoaderProcesses
from allstep.data.random import derive_seed, preserved_random_state, seed_all
from allstep.data.sampler import check_batches, local_part
from allstep.errors import DisagreementError, UsageError

__all__ = ["StreamLoader"]


@dataclass(frozen=True)
class _Part:
    """What a worker has for one global batch.

    Attributes:
        num_samples: of this worker (sharded), or of the whole global batch (replicated).
        micro_batches: (index, number of samples, collated samples) of each.
    """

    num_samples: int
    micro_batches: list[tuple[int, int, Any]]


_NOTHING = _Part(0, [])


class _Parts(IterableDataset[_Part]):
    """A stream of samples as a stream of this worker's parts of global batches.

    With several loader processes each gives every so many-th part, in turn. A replicated
    stream is read whole by each of them; a sharded one is split by the data set itself, as
    torch's get_worker_info lets it.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        slots: range,
        num_slots: int,
        micro_batch: int,
        is_sharded: bool,
        seed: int,
        collate_fn: Collate | None,
    ) -> None:
        self._dataset = dataset
        self._slots = slots
        self._num_slots = num_slots
        self._micro_batch = micro_batch
        self._is_sharded = is_sharded
        self._seed = seed
        self._collate = collate_fn or default_collate
        self.epoch = 0
        self.num_done = 0  # parts of the epoch that are behind us

    def __iter__(self) -> Iterator[_Part]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self._is_sharded:
            num_done = (self.num_done - worker + num_workers - 1) // num_workers
            parts = islice(self._parts(worker), num_done, None)
        else:
            parts = islice(self._parts(0), self.num_done + worker, None, num_workers)
        if info is not None:
            yield from parts
            return
        while True:
            with preserved_random_state():
                part = next(parts, None)
            if part is None:
                return
            yield part

    def _parts(self, worker: int) -> Iterator[_Part]:
        samples = self._samples(worker)
        num_read = len(self._slots) if self._is_sharded else self._num_slots
        while True:
            block = list(islice(samples, num_read * self._micro_batch))
            if not block:
                return
            yield _Part(len(block), list(self._cut(block)))

    def _samples(self, worker: int) -> Iterator[Any]:
        """The samples, each drawn with a random state of its own."""
        salt = (self._slots.start, worker) if self._is_sharded else ()
        stream, index = iter(self._dataset), 0
        while True:
            seed_all(derive_seed(self._seed, self.epoch, index, *salt))
            try:
                sample = next(stream)
            except StopIteration:
                return
            yield sample
            index += 1

    def _cut(self, block: list[Any]) -> Iterator[tuple[int, int, Any]]:
        first_slot = self._slots.start if self._is_sharded else 0
        for slot in self._slots:
            start = (slot - first_slot) * self._micro_batch
            samples = block[start : start + self._micro_batch]
            if samples:
                yield slot, len(samples), self._collate(samples)


class StreamLoader:
    """Hands out this worker's part of each global batch of a stream.

    See `allstep.data.loader`; the attributes are those of `MapLoader`. A stream is resumed by
    reading past what was consumed; a sharded one on the same number of workers only.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        comm: Communicator,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        drop_last: bool,
        is_sharded: bool,
        collate_fn: Collate | None,
        processes: LoaderProcesses,
    ) -> None:
        check_batches(global_batch, micro_batch)
        num_slots = global_batch // micro_batch
        if is_sharded and num_slots < comm.size:
            raise UsageError(
                f"`global_batch` (={global_batch}) has {num_slots} micro-batches for {comm.size}"
                " workers, each with a stream of its own; use"
                f" {comm.size * micro_batch} or more."
            )
        self.comm = comm
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seed = seed
        self.step = 0
        self.epoch = 0
        self._num_samples = 0
        self._drop_last = drop_last
        self._is_sharded = is_sharded
        self._parts = _Parts(
            dataset,
            slots=local_part(num_slots, comm.rank, comm.size),
            num_slots=num_slots,
            micro_batch=micro_batch,
            is_sharded=is_sharded,
            seed=seed,
            collate_fn=collate_fn,
        )
        # Processes would keep the position that they were started with: new ones each epoch.
        self._loader = processes.loader(self._parts, None, persistent=False)

    def global_batches(self) -> Iterator[GlobalBatch]:
        """The rest of the current epoch; a batch counts as consumed when it is handed out.

        Raises:
            DisagreementError: if a replicated stream is not the same on all workers.
        """
        self._parts.epoch = self.epoch
        parts = iter(self._loader)
        part, counts = self._announce(next(parts, _NOTHING))
        while num_samples := self._num_agreed(part, counts):
            if self._drop_last and num_samples < self.global_batch:
                break
            next_part, next_counts = self._announce(next(parts, _NOTHING))
            step, self.step = self.step, self.step + 1
            self._num_samples += num_samples
            self._parts.num_done += 1
            micro_batches = _as_micro_batches(part)
            yield GlobalBatch(step, self.epoch, num_samples, micro_batches, len(part.micro_batches))
            part, counts = next_part, next_counts
        self.epoch += 1
        self._parts.num_done = 0

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of the only worker.

        Raises:
            UsageError: if there are several workers, whose shares might be unequal.
        """
        if self.comm.size > 1:
            raise UsageError(
                f"A stream's workers ({self.comm.size}) may end with unequal shares, which a"
                " plain loop would weigh wrongly; use `allstep.steps`."
            )
        return (micro.data for batch in self.global_batches() for micro in batch.micro_batches)

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands; `samples` counts since the start, `batches` in this epoch."""
        return {
            "samples": self._num_samples,
            "steps": self.step,
            "epoch": self.epoch,
            "batches": self._parts.num_done,
            "workers": self.comm.size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from a `state_dict`, by reading past what was consumed.

        Raises:
            UsageError: if the state has no such keys, or if a sharded stream had another
                number of workers.
        """
        for key in ("samples", "steps", "epoch", "batches", "workers"):
            if state.get(key, -1) < 0:
                raise UsageError(
                    f"`state` (={dict(state)}) has no valid `{key}`; give what `state_dict` gave."
                )
        if self._is_sharded and state["workers"] != self.comm.size:
            raise UsageError(
                f"`state` is of {state['workers']} workers with a stream each; {self.comm.size}"
                f" have other streams. Resume on {state['workers']} workers."
            )
        self._num_samples, self.step = state["samples"], state["steps"]
        self.epoch, self._parts.num_done = state["epoch"], state["batches"]

    def close(self) -> None:
        """There is nothing to end: the processes of an epoch end with it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _announce(self, part: _Part) -> tuple[_Part, Pending[Tensor]]:
        """Starts to tell the others how many samples there are; see [Note: end of data]."""
        count = part.num_samples
        # Of a replicated stream all must say the same: the largest and minus the smallest do.
        told = torch.tensor([count] if self._is_sharded else [count, -count])
        if self._is_sharded:
            return part, self.comm.all_reduce(told, "sum", async_op=True)
        return part, self.comm.all_reduce(told, "max", async_op=True)

    def _num_agreed(self, part: _Part, counts: Pending[Tensor]) -> int:
        largest, *negated_smallest = counts.wait().tolist()
        if negated_smallest and largest != -negated_smallest[0]:
            found = self.comm.all_gather_object(part.num_samples)
            raise DisagreementError(
                f"The workers' streams differ: for global batch {self.step} they have"
                f" {', '.join(f'{n} (rank {rank})' for rank, n in enumerate(found))} samples."
                ' Give all workers the same stream, or say `stream="sharded"`.'
            )
        return int(largest)


def _as_micro_batches(part: _Part) -> Iterator[MicroBatch]:
    last = len(part.micro_batches) - 1
    for order, (index, num_samples, data) in enumerate(part.micro_batches):
        yield MicroBatch(index, num_samples, data, order == last)
