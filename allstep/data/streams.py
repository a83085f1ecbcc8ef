"""Loads the global batches of streams (iterable data sets) of unknown length.

[Note: end of data]
The length of a stream is unknown, and if each worker has its own stream, they end at different
times. So for every global batch the workers all-reduce the number of samples that they have for it.
Workers whose stream has ended contribute zero; the epoch ends when the sum is zero. The all-reduce
of a batch is started one batch ahead, so that no step waits for it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
import torch.utils.data._utils.worker as torch_worker
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from allstep.comm import Communicator, Work
from allstep.comm.agreement import agree
from allstep.data.batches import BatchingOptions, GlobalBatch, GlobalBatchLoader, MicroBatch
from allstep.data.fetch import RANDOM_STATE_LOCK, Collate, begin_epoch, checked_collate
from allstep.data.processes import Items
from allstep.data.random import derive_seed, preserved_random_state, seed_all
from allstep.data.same_data import content_of
from allstep.errors import UsageError

_PROCESSES = 0x70726F63  # makes the seeds of loader processes differ from those of samples


class _Part(NamedTuple):
    """A worker's part of one global batch, as a tuple, whose items torch's `pin_memory` pins.

    Attributes:
        num_samples: samples of this worker (sharded), or of the whole global batch (replicated).
        micro_batches: (index, number of samples, collated samples) for each of this worker's
            micro-batches.
        content: hash of the global batch's first sample (replicated).
    """

    num_samples: int
    micro_batches: list[tuple[int, int, Any]]
    content: int = 0


class StreamLoader(GlobalBatchLoader):
    """The loader of an IterableDataset; see `allstep.data.loader`.

    A stream is resumed by reading and discarding the samples of its epoch that were consumed. A
    replicated stream can be resumed on any number of workers. A sharded one can be resumed within
    an epoch only on the same number, with the same batches, shares and number of loader processes.

    An epoch without a global batch raises UsageError, such as with a stream that can be read only
    once.

    A replicated stream's short last batch assigns its micro-batches to workers as a full batch
    does, instead of evenly. So no worker has to keep samples in case they become its own.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        comm: Communicator,
        options: BatchingOptions,
        *,
        is_sharded: bool,
    ) -> None:
        super().__init__(comm, options)
        global_batch, micro_batch = self.global_batch, self.micro_batch
        num_slots = self.num_micro_batches
        if is_sharded and num_slots < comm.size:
            raise UsageError(
                f"`global_batch` (={global_batch}) has {num_slots} micro-batches for {comm.size}"
                " workers, each with a stream of its own; use"
                f" {comm.size * micro_batch} or more."
            )
        parts = self.shares.parts(num_slots)
        if is_sharded and not all(parts):
            raise UsageError(
                f"`shares` (={self.shares.how!r}) leave a worker without any of the {num_slots}"
                " micro-batches, but each has a stream of its own; raise `global_batch`"
                f" (={global_batch})."
            )
        self._is_sharded = is_sharded
        self._parts = _StreamParts(
            dataset=dataset,
            slots=parts[comm.rank],
            num_slots=num_slots,
            micro_batch=micro_batch,
            is_sharded=is_sharded,
            drop_last=options.drop_last,
            seed=self.seed,
            collate=checked_collate(options.collate_fn),
        )
        self._ahead: tuple[_Part, Work[Tensor]] | None = None
        self._epoch = 0
        self._epoch_samples = 0
        self._epoch_steps = 0
        self._num_samples = 0

    @property
    def epoch(self) -> int:
        """Number of whole passes over the stream so far."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """The position in the data: numbers of `samples` and `steps` since the start, and more."""
        position = {
            "samples": self._num_samples,
            "steps": self.step,
            "epoch": self._epoch,
            "epoch_samples": self._epoch_samples,
            "epoch_steps": self._epoch_steps,
        }
        return position | self._ways()

    def _ways(self) -> dict[str, Any]:
        """The settings on which a position within an epoch of a sharded stream depends."""
        parts = self.shares.parts(self.num_micro_batches) if self._is_sharded else ()
        return {
            "workers": self.comm.size,
            "global_batch": self.global_batch,
            "shares": [len(part) * self.micro_batch for part in parts],
            "num_workers": max(1, int(self._processes.num_workers)),  # it may be a numpy integer
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`; all workers must call it.

        Raises:
            UsageError: if a key is missing or a value is impossible, or if a sharded stream would
                continue within an epoch with other workers, batches, shares or `num_workers`.
        """
        self._check_state(state, "samples", "steps", "epoch", "epoch_samples", "epoch_steps")
        if state["epoch_steps"] and (self._is_sharded or state.get("shares")):
            for name, value in self._ways().items():
                if state.get(name) != value:
                    raise UsageError(
                        f'`state["{name}"]` (={state.get(name)}) must be {value} to go on within an'
                        " epoch of a sharded stream; resume as it was, or at an epoch's start."
                    )
        self.close()
        self._num_samples, self.step = state["samples"], state["steps"]
        self._epoch = state["epoch"]
        self._epoch_samples, self._epoch_steps = state["epoch_samples"], state["epoch_steps"]

    def close(self) -> None:
        """Ends the loader's processes; new ones are started when more batches are requested."""
        self._ahead = None
        super().close()

    def _next_batch(self) -> GlobalBatch | None:
        """The next batch; before it is returned, the one after it is read and its sum started."""
        part, counts = self._ahead or self._read()
        num_samples = self._num_agreed(part, counts)
        if num_samples == 0 or (self._drop_last and num_samples < self.global_batch):
            self.close()
            if self._epoch_steps == 0:
                raise self._nothing_given(num_samples)
            self._epoch, self._epoch_samples, self._epoch_steps = self._epoch + 1, 0, 0
            return None
        self._ahead = self._read()
        step, position = self.step, self._num_samples
        self.step += 1
        self._num_samples += num_samples
        self._epoch_samples += num_samples
        self._epoch_steps += 1
        return GlobalBatch(
            step,
            self._epoch,
            num_samples,
            _as_micro_batches(part),
            len(part.micro_batches),
            self._parts.num_slots,
            position,
        )

    def _read(self) -> tuple[_Part, Work[Tensor]]:
        """This worker's part of the following batch, and the pending all-reduce of its samples."""
        try:
            if self._items is None:
                self._items = self._open()
            part = next(self._items, _Part(0, []))
        except BaseException:
            self.close()
            raise
        # With a replicated stream all numbers must be equal: check the largest and the smallest.
        told = [part.num_samples, part.content]
        numbers = told[:1] if self._is_sharded else [*told, *(-number for number in told)]
        counts = torch.tensor(numbers)
        return part, self.comm.all_reduce(
            counts, "sum" if self._is_sharded else "max", async_op=True
        )

    def _open(self) -> Items:
        """Begins the epoch, or continues within it."""
        self._parts.epoch = self._epoch
        self._parts.num_skipped = self._epoch_samples
        own = (self._parts.slots.start,) if self._is_sharded else ()
        items = self._processes.start(
            self._parts, seed=derive_seed(self.seed, self._epoch, _PROCESSES, *own)
        )
        if self._is_sharded:
            for _ in range(self._epoch_steps):
                next(items, None)
        return items

    def _num_agreed(self, part: _Part, counts: Work[Tensor]) -> int:
        numbers = counts.wait().tolist()
        if not self._is_sharded and numbers[:2] != [-number for number in numbers[2:]]:
            agree(
                self.comm,
                "read a stream",
                [
                    (f"samples of global batch {self.step}", part.num_samples),
                    (f"first sample of global batch {self.step}", f"content {part.content:07x}"),
                ],
                cure='Give all workers the same stream, or say `stream="sharded"`.',
            )
        return int(numbers[0])

    def _nothing_given(self, num_samples: int) -> UsageError:
        """The error for an epoch without a global batch."""
        left_out = " (`drop_last` leaves out a short one)" if self._drop_last else ""
        return UsageError(
            f"`dataset` (a {type(self._parts.dataset).__name__}) gave {num_samples} samples in"
            f" epoch {self._epoch}, and no global batch of {self.global_batch}{left_out}: nothing"
            " would be trained. Have each `iter(dataset)` begin anew, with more samples, or take"
            " fewer epochs."
        )

    def _may_end_short(self) -> bool:
        return not self._drop_last


def _as_micro_batches(part: _Part) -> Iterator[MicroBatch]:
    last = len(part.micro_batches) - 1
    for order, (index, num_samples, data) in enumerate(part.micro_batches):
        yield MicroBatch(index, num_samples, data, order == last)


@dataclass(eq=False, kw_only=True)
class _StreamParts(IterableDataset[_Part]):
    """One epoch of a stream, divided into this worker's parts of global batches.

    Every global batch has the same slots for micro-batches; a worker fills its own slots. With n
    loader processes each makes every n-th part, in turn. A replicated stream is read in full by
    each of them; a sharded one is split among them by the data set itself, by means of torch's
    get_worker_info.

    Args:
        dataset: the stream.
        slots: this worker's slots.
        num_slots: number of slots of all workers.
        micro_batch: samples of a slot.
        is_sharded: whether this worker has its own stream.
        drop_last: omit an incomplete micro-batch, and with a sharded stream its whole part.
        seed: seed of the samples' random states.
        collate: samples -> micro-batch.
        epoch: number of passes over the stream before this one.
        num_skipped: number of samples of a replicated stream that are first read and discarded.
    """

    dataset: IterableDataset[Any]
    slots: range
    num_slots: int
    micro_batch: int
    is_sharded: bool
    drop_last: bool
    seed: int
    collate: Collate
    epoch: int = 0
    num_skipped: int = 0

    def __iter__(self) -> Iterator[_Part]:
        info = get_worker_info()
        reader, num_readers = (0, 1) if info is None else (info.id, info.num_workers)
        parts = self._sharded(reader) if self.is_sharded else self._replicated(reader, num_readers)
        return parts if info is not None else _with_own_random_state(parts)

    def _replicated(self, reader: int, num_readers: int) -> Iterator[_Part]:
        # A data set that splits itself among loader processes must not do so here.
        torch_worker._worker_info = None
        samples = islice(self._samples(), self.num_skipped, None)
        for number in count():
            is_mine = number % num_readers == reader
            first = list(islice(samples, 1))
            if not first:
                return
            content = content_of(first) % (1 << 28)  # before another sample fills its memory
            slots = self.slots if is_mine else range(0)
            part = self._part(chain(first, samples), range(self.num_slots), slots)
            if is_mine:
                yield part._replace(content=content)

    def _sharded(self, reader: int) -> Iterator[_Part]:
        num_wanted = len(self.slots) * self.micro_batch
        samples = self._samples(self.slots.start, reader)
        while (part := self._part(samples, self.slots, self.slots)).num_samples:
            if self.drop_last and part.num_samples < num_wanted:
                return
            yield part

    def _samples(self, *salt: int) -> Iterator[Any]:
        """The samples, each read with its own random state."""
        begin_epoch(self.dataset, self.seed, self.epoch, *salt)
        stream = iter(self.dataset)
        for index in count():
            seed_all(derive_seed(self.seed, self.epoch, index, *salt))
            try:
                sample = next(stream)
            except StopIteration:
                return
            except Exception as error:
                error.add_note(f"while reading sample {index} of the stream")
                raise
            yield sample

    def _part(self, samples: Iterator[Any], slots: range, own: range) -> _Part:
        """Reads samples for `slots`, and collates those of the slots in `own`.

        A micro-batch is collated after its last sample, before the next one is read. Hence a
        collate function that draws random numbers uses the state after that sample, whichever
        workers have the other slots.
        """
        total, micro_batches = 0, []
        for slot in slots:
            of_slot = islice(samples, self.micro_batch)
            local_samples = list(of_slot) if slot in own else []
            num_samples = len(local_samples) or sum(1 for _ in of_slot)
            total += num_samples
            is_short = num_samples < self.micro_batch
            if local_samples and not (is_short and self.drop_last):
                micro_batches.append((slot, num_samples, self.collate(local_samples)))
            if is_short:
                break
        return _Part(total, micro_batches)


def _with_own_random_state(parts: Iterator[_Part]) -> Iterator[_Part]:
    while True:
        with RANDOM_STATE_LOCK, preserved_random_state():
            part = next(parts, None)
        if part is None:
            return
        yield part
