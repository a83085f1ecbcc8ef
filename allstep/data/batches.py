"""Global batches, a worker's micro-batches of them, and the base class of their loaders."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from allstep.comm import Communicator
from allstep.data.fetch import Collate
from allstep.data.processes import Items, LoaderProcesses
from allstep.data.sampler import check_batches
from allstep.data.shares import Shares
from allstep.errors import UsageError, check_integer


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one pass through the model.

    Attributes:
        index: index of the micro-batch in the global batch, whichever worker runs it.
        num_samples: number of samples in `data`.
        data: the collated samples.
        is_last: whether it is this worker's last micro-batch of the global batch.
    """

    index: int
    num_samples: int
    data: Any
    is_last: bool


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """This worker's part of the samples of one optimizer step.

    Attributes:
        step: number of optimizer steps before this one.
        epoch: number of passes over the data before this one.
        num_samples: samples of the whole global batch, over all workers.
        micro_batches: this worker's micro-batches, fetched on demand; may be empty.
        num_local_micro_batches: number of this worker's micro-batches.
        num_micro_batches: number of micro-batches of all workers together.
        position: number of samples before this batch, over all epochs.
    """

    step: int
    epoch: int
    num_samples: int
    micro_batches: Iterator[MicroBatch]
    num_local_micro_batches: int
    num_micro_batches: int
    position: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """How samples are divided into global batches and micro-batches; see `allstep.data.loader`."""

    global_batch: int
    micro_batch: int
    seed: int
    drop_last: bool
    shares: Shares
    collate_fn: Collate | None
    processes: LoaderProcesses

    def __post_init__(self) -> None:
        check_batches(self.global_batch, self.micro_batch)
        check_integer("seed", self.seed, -(1 << 63))


class GlobalBatchLoader(ABC):
    """Yields this worker's part of each global batch; see `allstep.data.loader`.

    Attributes:
        comm: the workers that share the data.
        global_batch, micro_batch: samples of a step, and of a pass through the model.
        seed: seed of all random states.
        step: number of global batches yielded so far, over all epochs.
        shares: assignment of micro-batches to workers.
        kept_by: the argument of `steps` that keeps the position, "checkpoint" or "elastic", in the
            loop over its epochs; else "".
    """

    def __init__(self, comm: Communicator, options: BatchingOptions) -> None:
        self.comm = comm
        self.global_batch = int(options.global_batch)  # it may be a numpy integer
        self.micro_batch = int(options.micro_batch)
        self.seed = int(options.seed)
        self.step = 0
        self.shares = options.shares
        self.kept_by = ""
        self._drop_last = options.drop_last
        self._processes = options.processes
        self._items: Items | None = None  # open while samples are being read

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of whole passes over the data so far."""

    def global_batches(self) -> Iterator[GlobalBatch]:
        """The current epoch's remaining batches; a batch counts as consumed when it is yielded.

        Micro-batches of a batch that are not consumed when the next batch is requested are dropped.
        A loop that was left may be started again: it continues where it was.
        """
        epoch = self.epoch
        while self.epoch == epoch:
            batch = self._next_batch()
            if batch is not None:
                yield batch

    def __iter__(self) -> Iterator[Any]:
        """This worker's remaining micro-batches of the epoch, for a loop without `steps`.

        Each micro-batch is one step, so every worker must have one of the same size.

        Raises:
            UsageError: if the workers' shares of a global batch would be unequal.
        """
        size = self.comm.size
        if not self.shares.is_equal:
            raise UsageError(
                f"`shares` (={self.shares.how!r}) are for `allstep.steps`: in a plain loop each"
                " worker has one micro-batch a step."
            )
        if self.global_batch != size * self.micro_batch:
            raise UsageError(
                f"`global_batch` (={self.global_batch}) must be {size} workers x `micro_batch`"
                f" (={self.micro_batch}) = {size * self.micro_batch} for a plain loop, where each"
                " micro-batch is a step; `allstep.steps` takes any."
            )
        if size > 1 and self._may_end_short():
            raise UsageError(
                "An epoch's last global batch may be short, so that a plain loop would weigh the"
                f" {size} workers wrongly; use `allstep.steps`, or `drop_last=True`."
            )
        return (micro.data for batch in self.global_batches() for micro in batch.micro_batches)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in a full global batch, over all workers."""
        return self.global_batch // self.micro_batch

    def follow_shares(self, seconds: Sequence[float]) -> bool:
        """Divides the next global batches by the workers' seconds per micro-batch, if worthwhile.

        Call it between two global batches, on all workers alike. Samples that were read ahead are
        read again, as the division decides who reads them.

        Args:
            seconds: seconds per micro-batch, [workers], the same on all workers.

        Returns:
            Whether the division has changed.
        """
        has_moved = self.shares.follow(seconds, self.num_micro_batches)
        if has_moved:
            self.close()
        return has_moved

    def begin_again(self, state: Mapping[str, int]) -> None:
        """Divides global batches among the present workers of `comm`, from a position on.

        Args:
            state: what `state_dict` returned.
        """
        self.shares = Shares(self.shares.how, self.comm.size)
        self.load_state_dict(state)

    def options(self) -> dict[str, Any]:
        """The options that determine each step's samples; a position is valid for equal options."""
        return {
            "seed": self.seed,
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "drop_last": self._drop_last,
        }

    @abstractmethod
    def state_dict(self) -> dict[str, int]:
        """The position in the data: numbers of `samples` and `steps` since the start."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues from a `state_dict`.

        Raises:
            UsageError: if a key is missing, a value is impossible, or the state is for other data.
        """

    def close(self) -> None:
        """Ends the loader's processes; new ones are started when more batches are requested."""
        if self._items is not None:
            self._items.close()
            self._items = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _next_batch(self) -> GlobalBatch | None:
        """The next batch; None if the epoch turned out to be over."""

    @abstractmethod
    def _may_end_short(self) -> bool:
        """Whether the rest of the epoch may end with an incomplete global batch."""

    @staticmethod
    def _check_state(state: Mapping[str, int], *keys: str) -> None:
        for key in keys:
            if key not in state:
                raise UsageError(
                    f"`state` (={dict(state)}) has no `{key}`; give what `state_dict` gave."
                )
            check_integer(f'state["{key}"]', state[key], 0)
