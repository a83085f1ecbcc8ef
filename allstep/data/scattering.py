"""A data set split over the workers, for loops that don't use global batches."""

from collections.abc import Sized
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from allstep.comm import Communicator
from allstep.data.random import derive_seed
from allstep.errors import UsageError

__all__ = ["scatter"]


def scatter(
    dataset: Dataset[Any] | None,
    comm: Communicator,
    *,
    shuffle: bool = False,
    seed: int = 0,
    equal_length: bool = False,
    root: int | None = None,
) -> Dataset[Any]:
    """This worker's part of a data set; the parts are disjoint and cover it.

    Args:
        dataset: map-style; with `root`, what the others pass is not looked at.
        comm: the workers.
        shuffle: split a permutation seeded by `seed`, instead of the set's own order.
        seed: of the permutation.
        equal_length: make the parts equally long by repeating the first samples at the end.
        root: the one worker that has the data set; its samples travel to the others (tensors,
            numpy arrays and plain data). None if every worker has it.

    Returns:
        A part; lengths differ by at most one.

    Raises:
        UsageError: if the data set is empty, or `root` is no rank.

    >>> len(scatter(range(10), Communicator.lone()))
    10
    """
    if root is None:
        assert dataset is not None
        indices = _indices(len(cast(Sized, dataset)), comm.size, shuffle, seed, equal_length)
        return Subset(dataset, indices[comm.rank].tolist())
    if not 0 <= root < comm.size:
        raise UsageError(f"`root` (={root}) must be a rank, 0 to {comm.size - 1}.")
    parts = None
    if comm.rank == root:
        assert dataset is not None
        indices = _indices(len(cast(Sized, dataset)), comm.size, shuffle, seed, equal_length)
        parts = [[dataset[int(index)] for index in part] for part in indices]
    return _Samples(comm.scatter_object(parts, root=root))


class _Samples(Dataset[Any]):
    """Samples in memory."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def _indices(
    num_samples: int, size: int, shuffle: bool, seed: int, equal_length: bool
) -> list[NDArray[np.int64]]:
    if num_samples == 0:
        raise UsageError("`dataset` is empty: there is nothing to split.")
    order = np.arange(num_samples)
    if shuffle:
        order = np.random.Generator(np.random.PCG64(derive_seed(seed))).permutation(num_samples)
    if equal_length:
        order = np.resize(order, -(-num_samples // size) * size)
    return np.array_split(order, size)
