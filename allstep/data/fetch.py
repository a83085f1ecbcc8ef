"""Samples to micro-batches, each sample with a random state of its own."""

from collections.abc import Callable, Sequence, Sized
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from allstep.data.random import derive_seed, preserved_random_state, seed_all
from allstep.errors import UsageError

Collate = Callable[[list[Any]], Any]
Key = tuple[int, Sequence[int] | NDArray[np.int64]]  # (epoch, indices of samples)

# The random states belong to the process: workers that are its threads take turns with them.
# A loader's process never waits for it, as it may have been copied from the parent locked.
RANDOM_STATE_LOCK = Lock()


def is_map_style(dataset: object) -> bool:
    """Whether samples can be read by their index; of a stream or a torch DataLoader they can't."""
    is_stream = isinstance(dataset, IterableDataset)
    return isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and not is_stream


def not_map_style(dataset: object) -> UsageError:
    """The error for such a data set where one that is map-style is needed."""
    return UsageError(
        f"`dataset` (a {type(dataset).__name__}) has no length or can't be indexed; give a"
        " map-style set, not a stream or a DataLoader."
    )


def fetch_sample(dataset: Dataset[Any], seed: int, epoch: int, index: int) -> Any:
    """One sample, drawn with the random state of (seed, epoch, index).

    So an augmentation draws the same numbers on any number of workers and loader processes.
    An exception keeps its type; its traceback ends with the sample's index.
    """
    seed_all(derive_seed(seed, epoch, index))
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"while fetching sample {index} of the data set")
        raise


def begin_epoch(dataset: Dataset[Any], seed: int, epoch: int, *salt: int) -> None:
    """Tells a data set that shuffles itself the epoch; what it draws follows from that."""
    seed_all(derive_seed(seed, epoch, -1, *salt))
    _tell_epoch(dataset, epoch)


def _tell_epoch(dataset: Dataset[Any], epoch: int) -> None:
    """Also those that torch's wrappers hold, which have no `set_epoch`."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    elif isinstance(dataset, Subset):
        _tell_epoch(dataset.dataset, epoch)
    elif isinstance(dataset, (ConcatDataset, ChainDataset)):
        for part in dataset.datasets:
            _tell_epoch(part, epoch)


def checked_collate(collate_fn: Collate | None) -> Collate:
    """The function, or torch's default when None.

    Raises:
        UsageError: if it can't be called.
    """
    if collate_fn is None:
        return default_collate
    if not callable(collate_fn):
        raise UsageError(
            f"`collate_fn` (={collate_fn!r}) must be a function: list of samples -> micro-batch; or"
            " None for torch's."
        )
    return collate_fn


class FetchMicroBatch(Dataset[Any]):
    """A data set of micro-batches: its keys are (epoch, indices of samples).

    Args:
        dataset: map-style.
        seed: of the samples' random states.
        collate_fn: samples -> micro-batch; torch's default when None.
        tells_epoch: whether the data set is told each epoch that begins.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        collate_fn: Collate | None,
        *,
        tells_epoch: bool = False,
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._collate = checked_collate(collate_fn)
        # Tensors are indexed in one go: nothing in them can be random.
        self._tensors = tensors_of(dataset) if collate_fn is None else None
        self._tells_epoch = tells_epoch
        self._told_epoch: int | None = None  # of this process's copy of the data set

    def forget_epoch(self) -> None:
        """Has the data set told the epoch at the next sample, whatever it was told before."""
        self._told_epoch = None

    def __getitem__(self, key: Key) -> Any:
        epoch, indices = key
        if self._tensors is not None:
            tensors, positions = self._tensors
            chosen = torch.as_tensor(indices)
            chosen = chosen if positions is None else positions[chosen]
            return [tensor[chosen] for tensor in tensors]
        if get_worker_info() is not None:
            return self._collate_samples(epoch, indices)
        with RANDOM_STATE_LOCK, preserved_random_state():
            return self._collate_samples(epoch, indices)

    def _collate_samples(self, epoch: int, indices: Sequence[int] | NDArray[np.int64]) -> Any:
        if self._tells_epoch and epoch != self._told_epoch:
            begin_epoch(self.dataset, self._seed, epoch)
            self._told_epoch = epoch
        return self._collate(
            [fetch_sample(self.dataset, self._seed, epoch, int(index)) for index in indices]
        )


def tensors_of(dataset: Dataset[Any]) -> tuple[Sequence[Tensor], Tensor | None] | None:
    """The tensors of a TensorDataset, or of a Subset of one with its indices; else None."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is not Subset:
        return None
    inner = tensors_of(dataset.dataset)
    if inner is None:
        return None
    tensors, positions = inner
    chosen = torch.as_tensor(dataset.indices, dtype=torch.int64)
    return tensors, chosen if positions is None else positions[chosen]
