"""Splits a data set among the workers, for loops that don't use global batches."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset, TensorDataset

from allstep.comm import Communicator
from allstep.data.fetch import is_map_style, not_map_style
from allstep.data.random import derive_permutation
from allstep.data.same_data import check_same_arguments
from allstep.errors import UsageError


def split(
    dataset: Dataset[Any] | None,
    comm: Communicator,
    *,
    shuffle: bool = False,
    seed: int = 0,
    equal_length: bool = False,
    root: int | None = None,
) -> Dataset[Any]:
    """This worker's part of a data set; the parts are disjoint and cover it. Collective.

    Args:
        dataset: a map-style data set; with `root`, it is ignored on the other workers.
        comm: the workers; each of them must call this.
        shuffle: split a permutation seeded by `seed`, instead of the set's own order.
        seed: seed of the permutation.
        equal_length: make the parts equally long by repeating the first samples at the end.
        root: rank of the one worker that has the data set, whose samples are sent to the others
            (tensors, numpy arrays and plain data); None if every worker has it.

    Returns:
        The part; lengths differ by at most one. With `root` it is held in memory.

    Raises:
        UsageError: if the data set is empty or not map-style, or `root` isn't a rank.
        DisagreementError: if lengths of the data sets or other arguments differ between workers.

    >>> len(split(range(10), Communicator.single_process()))
    10
    """
    shown = {"shuffle": shuffle, "seed": seed, "equal_length": equal_length, "root": root}
    check_same_arguments(comm, "split a data set", dataset if root is None else None, shown)
    if root is None:
        num_samples = _check_length(_length(dataset), dataset)
        indices = _indices(num_samples, comm.size, shuffle, seed, equal_length)
        assert dataset is not None
        return Subset(dataset, indices[comm.rank].tolist())
    if not isinstance(root, int) or not 0 <= root < comm.size:
        raise UsageError(f"`root` (={root!r}) must be a rank, 0 to {comm.size - 1}.")
    # A mistake of the root's must raise on every worker, not leave the others waiting.
    num_samples = comm.broadcast_object(_length(dataset), root=root)
    num_samples = _check_length(num_samples, dataset)
    parts = None
    if comm.rank == root:
        assert dataset is not None
        indices = _indices(num_samples, comm.size, shuffle, seed, equal_length)
        parts = [_packed(dataset, part) for part in indices]
    return _unpacked(comm.scatter_object(parts, root=root))


def _packed(dataset: Dataset[Any], indices: NDArray[np.int64]) -> dict[str, Any]:
    """The samples as plain data; those of a TensorDataset as one tensor per field."""
    if type(dataset) is TensorDataset:
        chosen = torch.from_numpy(indices)
        return {"tensors": [tensor[chosen].cpu() for tensor in dataset.tensors]}
    return {"samples": [dataset[index] for index in indices.tolist()]}


def _unpacked(packed: dict[str, Any]) -> Dataset[Any]:
    if "tensors" in packed:
        return TensorDataset(*packed["tensors"])
    samples = packed["samples"]
    return Subset(samples, range(len(samples)))


def _length(dataset: Dataset[Any] | None) -> int | None:
    return len(dataset) if is_map_style(dataset) else None  # type: ignore[arg-type]


def _check_length(num_samples: int | None, dataset: object) -> int:
    if num_samples is None:
        raise not_map_style(dataset)
    if num_samples == 0:
        raise UsageError("`dataset` is empty: there is nothing to split.")
    return num_samples


def _indices(
    num_samples: int, size: int, shuffle: bool, seed: int, equal_length: bool
) -> list[NDArray[np.int64]]:
    order = derive_permutation(num_samples, seed) if shuffle else np.arange(num_samples)
    if equal_length:
        order = np.resize(order, -(-num_samples // size) * size)
    return np.array_split(order, size)
