"""Data sets and streams for the tests of the loaders."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from allstep.comm import Communicator
from allstep.comm.announced import AnnouncedCalls
from allstep.comm.wire import SingleProcessWire


class Seat(Communicator):
    """A worker's place: all that a loader of a map-style set asks of a communicator."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.announced = AnnouncedCalls(SingleProcessWire(timeout_s=1.0))
        self.messages = Echo(size)  # type: ignore[assignment]


@dataclass(frozen=True)
class Echo:
    """The messages of workers who all have the same to say."""

    size: int

    def all_gather(self, body: bytes, verb: str, *, compares: bool) -> list[bytes]:
        return [body] * self.size


class Augmented(Dataset[tuple[Tensor, int]]):
    """Each sample draws from the random states of python, numpy and torch."""

    def __init__(self, num_samples: int = 22) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return draw(), index


def draw() -> Tensor:
    numbers = [random.random(), np.random.random()]
    return torch.cat([torch.tensor(numbers, dtype=torch.float64), torch.rand(1).double()])


class Stream(IterableDataset[tuple[Tensor, int]]):
    """Samples first, first + 1, …, augmented like `Augmented`."""

    def __init__(self, num_samples: int, first: int = 0) -> None:
        self.num_samples = num_samples
        self._first = first

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for index in range(self._first, self._first + self.num_samples):
            yield draw(), index


class SplitStream(Stream):
    """Splits itself among loader processes, as torch's documentation tells."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, self.num_samples, step):
            yield draw(), index


Content = dict[tuple[int, int], list[Tensor]]


def contents(loader: Any) -> Content:
    """This worker's micro-batches of the rest of the epoch, by (step, index)."""
    found = {}
    for batch in loader.global_batches():
        micro_batches = list(batch.micro_batches)
        assert len(micro_batches) == batch.num_local_micro_batches
        assert [micro.is_last for micro in micro_batches] == [False] * (len(micro_batches) - 1) + [
            True
        ] * bool(micro_batches)
        for micro in micro_batches:
            assert len(micro.data[1]) == micro.num_samples
            found[batch.step, micro.index] = list(micro.data)
    return found


def union(parts: list[Content]) -> Content:
    """All workers' micro-batches; no two may have the same one."""
    found: Content = {}
    for part in parts:
        assert not found.keys() & part.keys()
        found.update(part)
    return found


def equal(a: Content, b: Content) -> bool:
    """Whether all bits are the same."""
    return a.keys() == b.keys() and all(
        all(torch.equal(x, y) for x, y in zip(a[key], b[key], strict=True)) for key in a
    )


def indices(content: Content) -> list[list[int]]:
    """The samples' indices, micro-batch by micro-batch."""
    return [content[key][1].tolist() for key in sorted(content)]


def samples(content: Content) -> list[int]:
    """All samples' indices in order."""
    return sorted(index for micro_batch in indices(content) for index in micro_batch)
