"""Global batches of streams (iterable data sets), which end when they end.

[Note: end of data]
Nobody knows how long a stream is, and with a stream for each worker they end at different
moments. So for every global batch the workers all-reduce how many samples they have for it.
Those whose stream has ended take part with none; the epoch ends where the sum is zero. The
all-reduce of a batch is started one batch ahead, so that no step waits for it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from allstep.comm import Communicator, Pending
from allstep.data.base import GlobalBatchLoader
from allstep.data.batches import GlobalBatch, MicroBatch
from allstep.data.fetch import Collate
from allstep.data.processes import Items, LoaderProcesses
from allstep.data.sampler import local_part
from allstep.data.stream_parts import Part, StreamParts
from allstep.errors import DisagreementError, UsageError

__all__ = ["StreamLoader"]

_NOTHING = Part(0, [])


class StreamLoader(GlobalBatchLoader):
    """The loader of an IterableDataset; see `allstep.data.loader`.

    A stream is resumed by reading and throwing away what was consumed of its epoch. A
    replicated one can be resumed on any number of workers; a sharded one, within an epoch, only
    on the same number with the same batches.

    A replicated stream's short last batch has its micro-batches where a whole one has them,
    instead of sharing them out evenly: a worker need not keep samples that may become its own.
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
        super().__init__(comm, global_batch=global_batch, micro_batch=micro_batch, seed=seed)
        num_slots = global_batch // micro_batch
        if is_sharded and num_slots < comm.size:
            raise UsageError(
                f"`global_batch` (={global_batch}) has {num_slots} micro-batches for {comm.size}"
                " workers, each with a stream of its own; use"
                f" {comm.size * micro_batch} or more."
            )
        self._drop_last = drop_last
        self._is_sharded = is_sharded
        self._processes = processes
        self._parts = StreamParts(
            dataset,
            slots=local_part(num_slots, comm.rank, comm.size),
            num_slots=num_slots,
            micro_batch=micro_batch,
            is_sharded=is_sharded,
            drop_last=drop_last,
            seed=seed,
            collate_fn=collate_fn,
        )
        self._items: Items | None = None
        self._ahead: tuple[Part, Pending[Tensor]] | None = None
        self._epoch = 0
        self._epoch_samples = 0
        self._epoch_steps = 0
        self._num_samples = 0

    @property
    def epoch(self) -> int:
        """Whole passes over the stream so far."""
        return self._epoch

    def state_dict(self) -> dict[str, int]:
        """Where the data stands: `samples` consumed and `steps` made since the start, and more."""
        return {
            "samples": self._num_samples,
            "steps": self.step,
            "epoch": self._epoch,
            "epoch_samples": self._epoch_samples,
            "epoch_steps": self._epoch_steps,
            "workers": self.comm.size,
            "global_batch": self.global_batch,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from a `state_dict`; all workers call it.

        Raises:
            UsageError: if a key is missing or a value impossible, or if a sharded stream would
                go on within an epoch with other workers or another global batch.
        """
        self._check_state(state, *self.state_dict())
        if self._is_sharded and state["epoch_steps"]:
            for name, value in (("workers", self.comm.size), ("global_batch", self.global_batch)):
                if state[name] != value:
                    raise UsageError(
                        f'`state["{name}"]` (={state[name]}) must be {value} to go on within an'
                        " epoch of a sharded stream; resume as it was, or at an epoch's start."
                    )
        self.close()
        self._num_samples, self.step = state["samples"], state["steps"]
        self._epoch = state["epoch"]
        self._epoch_samples, self._epoch_steps = state["epoch_samples"], state["epoch_steps"]

    def close(self) -> None:
        """Ends the loader's processes; asked for more, it starts new ones."""
        self._ahead = None
        if self._items is not None:
            self._items.close()
            self._items = None

    def _next_batch(self) -> GlobalBatch | None:
        """The next batch; the one after it is read and announced first."""
        part, counts = self._ahead or self._read()
        num_samples = self._num_agreed(part, counts)
        if num_samples == 0 or (self._drop_last and num_samples < self.global_batch):
            self.close()
            self._epoch, self._epoch_samples, self._epoch_steps = self._epoch + 1, 0, 0
            return None
        self._ahead = self._read()
        step, self.step = self.step, self.step + 1
        self._num_samples += num_samples
        self._epoch_samples += num_samples
        self._epoch_steps += 1
        micro_batches = _as_micro_batches(part)
        return GlobalBatch(step, self._epoch, num_samples, micro_batches, len(part.micro_batches))

    def _read(self) -> tuple[Part, Pending[Tensor]]:
        """This worker's part of the following batch, and how many samples all of them have."""
        try:
            if self._items is None:
                self._items = self._open()
            part = next(self._items, _NOTHING)
        except BaseException:
            self.close()
            raise
        # Of a replicated stream all must say the same: the largest and minus the smallest do.
        num = part.num_samples
        counts = torch.tensor([num] if self._is_sharded else [num, -num])
        return part, self.comm.all_reduce(
            counts, "sum" if self._is_sharded else "max", async_op=True
        )

    def _open(self) -> Items:
        """Begins the epoch, or goes on within it."""
        self._parts.epoch = self._epoch
        self._parts.num_skipped = self._epoch_samples
        items = self._processes.start(self._parts, seed=self.seed)
        if self._is_sharded:
            for _ in range(self._epoch_steps):
                next(items, None)
        return items

    def _num_agreed(self, part: Part, counts: Pending[Tensor]) -> int:
        largest, *negated_smallest = counts.wait().tolist()
        if negated_smallest and largest != -negated_smallest[0]:
            found = self.comm.all_gather_object(part.num_samples)
            raise DisagreementError(
                f"The workers' streams differ: for global batch {self.step} they have"
                f" {', '.join(f'{n} (rank {rank})' for rank, n in enumerate(found))} samples."
                ' Give all workers the same stream, or say `stream="sharded"`.'
            )
        return int(largest)

    def _may_end_short(self) -> bool:
        return not self._drop_last


def _as_micro_batches(part: Part) -> Iterator[MicroBatch]:
    last = len(part.micro_batches) - 1
    for order, (index, num_samples, data) in enumerate(part.micro_batches):
        yield MicroBatch(index, num_samples, data, order == last)
