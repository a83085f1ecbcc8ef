"""Fetches samples, each with its own random state, and collates them to micro-batches."""

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

# A process has one set of random states, so workers that are threads of it take turns.
# A loader process never waits for the lock, since it may have been forked while it was locked.
RANDOM_STATE_LOCK = Lock()


def is_map_style(dataset: object) -> bool:
    """Whether samples can be read by index, unlike those of a stream or of a torch DataLoader."""
    is_stream = isinstance(dataset, IterableDataset)
    return isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and not is_stream


def not_map_style(dataset: object) -> UsageError:
    """The error for a data set that should be map-style but isn't."""
    return UsageError(
        f"`dataset` (a {type(dataset).__name__}) has no length or can't be indexed; give a"
        " map-style set, not a stream or a DataLoader."
    )


def fetch_sample(dataset: Dataset[Any], seed: int, epoch: int, index: int) -> Any:
    """Fetches a sample with the random state of (seed, epoch, index).

    Hence an augmentation draws the same random numbers on any number of workers and loader
    processes. An exception of the data set is raised with a note that names the sample's index.
    """
    seed_all(derive_seed(seed, epoch, index))
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"while fetching sample {index} of the data set")
        raise


def begin_epoch(dataset: Dataset[Any], seed: int, epoch: int, *salt: int) -> None:
    """Calls `set_epoch` of the data set if it has one, with a random state for the epoch."""
    seed_all(derive_seed(seed, epoch, -1, *salt))
    _tell_epoch(dataset, epoch)


def _tell_epoch(dataset: Dataset[Any], epoch: int) -> None:
    """Calls `set_epoch` of the data set, or of those within torch's wrappers, which have none."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    elif isinstance(dataset, Subset):
        _tell_epoch(dataset.dataset, epoch)
    elif isinstance(dataset, (ConcatDataset, ChainDataset)):
        for part in dataset.datasets:
            _tell_epoch(part, epoch)


def checked_collate(collate_fn: Collate | None) -> Collate:
    """The function; torch's default collate function if it is None.

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
        dataset: a map-style data set.
        seed: seed of the samples' random states.
        collate_fn: samples -> micro-batch; None for torch's default.
        tells_epoch: whether `set_epoch` of the data set is called at the start of each epoch.
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
        # Tensors are indexed all at once, since reading them draws no random numbers.
        self._tensors = tensors_of(dataset) if collate_fn is None else None
        self._tells_epoch = tells_epoch
        self._told_epoch: int | None = None  # that this process's copy of the data set was given

    def forget_epoch(self) -> None:
        """Makes the next sample call `set_epoch` of the data set, even if the epoch is the same."""
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
    """The tensors of a TensorDataset, or those of a Subset of one and its indices; else None."""
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
