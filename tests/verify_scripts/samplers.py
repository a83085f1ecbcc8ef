"""How workers share the samples, rightly and wrongly: each worker's part of each batch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

import allstep

BATCH = 24


def from_sampler(
    samples: Any, comm: allstep.Communicator, batch: int, *, rank: int | None = None, seed: int = 3
) -> Iterator[Any]:
    sampler: Any = DistributedSampler(
        samples, comm.size, comm.rank if rank is None else rank, seed=seed
    )
    for epoch in range(100):
        sampler.set_epoch(epoch)
        yield from DataLoader(samples, batch_size=batch, sampler=sampler)


def repeated(parts: list[Tensor], samples: Any, comm: allstep.Communicator) -> Iterator[Any]:
    """Every worker's stride of each part, over and over."""
    while True:
        for part in parts:
            yield samples[part[comm.rank :: comm.size]]


def columns(samples: Any, comm: allstep.Communicator) -> Iterator[Any]:
    """As word_language_model: time goes down, samples go across; no contiguous memory."""
    x, y = (t.t().chunk(comm.size, dim=1)[comm.rank] for t in samples.tensors)
    while True:
        for i in range(0, len(x) - 7, 8):
            yield x[i : i + 8], y[i : i + 8]


def drawn(samples: Any, comm: allstep.Communicator, *, by_numpy: bool = False) -> Iterator[Any]:
    num = BATCH // comm.size
    while True:
        if by_numpy:
            yield samples[np.random.randint(len(samples), size=num)]
        else:
            yield samples[torch.randint(len(samples), (num,))]


def made(samples: Any, comm: allstep.Communicator) -> Iterator[Any]:
    while True:
        x = torch.randn(BATCH // comm.size, samples.tensors[0].shape[1])
        yield x, x[:, :3].argmax(1)


def blocks(samples: Any, comm: allstep.Communicator) -> Iterator[Any]:
    num = len(samples) // comm.size
    part = Subset(samples, range(comm.rank * num, (comm.rank + 1) * num))
    while True:
        yield from DataLoader(part, batch_size=BATCH // comm.size)


SAMPLERS: dict[str, Any] = {
    "shared": lambda s, comm: from_sampler(s, comm, BATCH // comm.size),
    "rank_0": lambda s, comm: from_sampler(s, comm, BATCH // comm.size, rank=0),
    "seed_by_rank": lambda s, comm: from_sampler(s, comm, BATCH // comm.size, seed=comm.rank),
    "whole_batch": lambda s, comm: from_sampler(s, comm, BATCH),
    "rounded_down": lambda s, comm: from_sampler(s, comm, 25 // comm.size),
    "padded": lambda s, comm: from_sampler(Subset(s, range(31)), comm, BATCH // comm.size),
    "none": lambda s, comm: iter(list(DataLoader(s, BATCH // comm.size)) * 100),
    "unequal": lambda s, comm: repeated([*torch.arange(95).split(BATCH - 5)], s, comm),
    "short_last": lambda s, comm: repeated([*torch.arange(91).split(BATCH)], s, comm),
    "columns": columns,
    "drawn": drawn,
    "drawn_by_numpy": lambda s, comm: drawn(s, comm, by_numpy=True),
    "made": made,
    "blocks": blocks,
}
