"""Data sets for the tests, importable by loader processes."""

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset


class Noisy(Dataset[tuple[int, Tensor]]):
    """Each sample is its index and three numbers, one from each random state."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return index, torch.tensor(numbers, dtype=torch.float64)


class Broken(Dataset[int]):
    """Cannot read sample 5."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise OSError("disk on fire")
        return index


class Counting(IterableDataset[tuple[int, Tensor]]):
    """A stream of start, start + 1, … with a random number beside each."""

    def __init__(self, num_samples: int, start: int = 0) -> None:
        self._numbers = range(start, start + num_samples)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for number in self._numbers:
            yield number, torch.rand((), dtype=torch.float64)
