"""Checksums of samples, parameters and random states."""

import random
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def random_states() -> dict[str, int]:
    """Checksums of the states of Python's and numpy's generators.

    >>> before = random_states()
    >>> _ = random.random()
    >>> [name for name, state in random_states().items() if state != before[name]]
    ['Python']
    """
    of_numpy = np.random.get_state(legacy=False)["state"]
    states = {"Python": random.getstate(), "numpy": (of_numpy["key"].tolist(), of_numpy["pos"])}
    return {name: zlib.crc32(repr(state).encode()) for name, state in states.items()}


def checksums_of_samples(tensors: Sequence[Tensor]) -> list[int]:
    """A checksum for each sample, of all tensors with the first one's first dimension."""
    tensors = [tensor for tensor in tensors if tensor.numel() and tensor.dim()]
    if not tensors:
        return []
    checksums = [0] * tensors[0].size(0)
    for tensor in tensors:
        if tensor.size(0) == len(checksums):
            in_blocks = tensor.layout in (torch.sparse_bsr, torch.sparse_bsc)
            rows = (tensor.to_dense() if in_blocks else tensor).unbind()
            checksums = [checksum(row, c) for row, c in zip(rows, checksums, strict=True)]
    return checksums


def checksum(tensor: Tensor, start: int = 0) -> int:
    """A checksum of a tensor's bits, independent of its memory layout."""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    values = dense.cpu().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().tobytes(), start)
