"""A stream of samples as a stream of one worker's parts of global batches.

This is what runs where the stream is read: in the worker, or in its loader processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from allstep.data.fetch import RANDOM_STATE_LOCK, Collate
from allstep.data.random import derive_seed, preserved_random_state, seed_all

__all__ = ["Part", "StreamParts"]


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker has for one global batch.

    Attributes:
        num_samples: of this worker (sharded), or of the whole global batch (replicated).
        micro_batches: (index, number of samples, collated samples) of each of this worker's.
    """

    num_samples: int
    micro_batches: list[tuple[int, int, Any]]


class StreamParts(IterableDataset[Part]):
    """One epoch of a stream, cut.

    Every global batch has the same slots for micro-batches; a worker fills its own. With
    several loader processes each makes every so many-th part, in turn. A replicated stream is
    read whole by each of them; a sharded one is split among them by the data set itself, as
    torch's get_worker_info lets it.

    Args:
        dataset: the stream.
        slots: of this worker.
        num_slots: of all workers.
        micro_batch: samples of a slot.
        is_sharded: whether this worker's stream is its own.
        drop_last: of a sharded stream, leave out the last part if it is incomplete.
        seed: start of the samples' random states.
        collate_fn: samples -> micro-batch; torch's default when None.

    Attributes:
        epoch: passes over the stream before this one.
        num_skipped: samples of a replicated stream that are read and thrown away first.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        slots: range,
        num_slots: int,
        micro_batch: int,
        is_sharded: bool,
        drop_last: bool,
        seed: int,
        collate_fn: Collate | None,
    ) -> None:
        self._dataset = dataset
        self._slots = slots
        self._num_slots = num_slots
        self._micro_batch = micro_batch
        self._is_sharded = is_sharded
        self._drop_last = drop_last
        self._seed = seed
        self._collate = collate_fn or default_collate
        self.epoch = 0
        self.num_skipped = 0

    def __iter__(self) -> Iterator[Part]:
        info = get_worker_info()
        reader, num_readers = (0, 1) if info is None else (info.id, info.num_workers)
        parts = self._sharded(reader) if self._is_sharded else self._replicated(reader, num_readers)
        return parts if info is not None else _with_own_random_state(parts)

    def _replicated(self, reader: int, num_readers: int) -> Iterator[Part]:
        # A data set that splits itself among loader processes must not do so here.
        torch_worker._worker_info = None
        samples = islice(self._samples(), self.num_skipped, None)
        for number in count():
            is_mine = number % num_readers == reader
            num_samples, local_samples = 0, []
            for sample in islice(samples, self._num_slots * self._micro_batch):
                if is_mine and num_samples // self._micro_batch in self._slots:
                    local_samples.append(sample)
                num_samples += 1
            if num_samples == 0:
                return
            if is_mine:
                yield self._part(num_samples, local_samples)

    def _sharded(self, reader: int) -> Iterator[Part]:
        num_wanted = len(self._slots) * self._micro_batch
        samples = self._samples(self._slots.start, reader)
        while local_samples := list(islice(samples, num_wanted)):
            if self._drop_last and len(local_samples) < num_wanted:
                return
            yield self._part(len(local_samples), local_samples)

    def _samples(self, *salt: int) -> Iterator[Any]:
        """The samples, each drawn with a random state of its own."""
        if hasattr(self._dataset, "set_epoch"):  # streams that shuffle themselves often have it
            self._dataset.set_epoch(self.epoch)
        seed_all(derive_seed(self._seed, self.epoch, -1, *salt))
        stream = iter(self._dataset)
        for index in count():
            seed_all(derive_seed(self._seed, self.epoch, index, *salt))
            try:
                sample = next(stream)
            except StopIteration:
                return
            except Exception as error:
                error.add_note(f"while reading sample {index} of the stream")
                raise
            yield sample

    def _part(self, num_samples: int, local_samples: list[Any]) -> Part:
        cut = (
            local_samples[start : start + self._micro_batch]
            for start in range(0, len(local_samples), self._micro_batch)
        )
        micro_batches = [
            (slot, len(samples), self._collate(samples))
            for slot, samples in zip(self._slots, cut, strict=False)
        ]
        return Part(num_samples, micro_batches)


def _with_own_random_state(parts: Iterator[Part]) -> Iterator[Part]:
    while True:
        with RANDOM_STATE_LOCK, preserved_random_state():
            part = next(parts, None)
        if part is None:
            return
        yield part
