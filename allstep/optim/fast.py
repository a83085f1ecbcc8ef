"""Few passes over memory: torch's fused kernels block by block, or its multi-tensor kernels.

[Note: directions from fused Adam] torch's fused Adam kernel subtracts lr times the bias-corrected
direction from its parameter, in one pass that also moves both moments on. Given a scratch tensor
that holds weight_decay * x as the parameter, and -1 as the rate, it leaves weight_decay * x plus
the direction there: the update that LAMB takes the norm of. On a CPU this is done in blocks, so
that weight, scratch and both norms stay in the cache. A step of infinity switches the correction
off, because beta ** infinity is 0.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from allstep.errors import UsageError
from allstep.optim.leaves import Batch
from allstep.optim.trust import Norm

__all__ = [
    "BLOCK_ELEMENTS",
    "Way",
    "blocks",
    "check_ways",
    "choose_way",
    "combine",
    "flats_of",
]

Way = Literal["plain", "foreach", "fused"]

# Smaller blocks stay in closer caches, but start the threads more often; measured on 1 and 2.
BLOCK_ELEMENTS = 2**20


def check_ways(fused: bool | None, foreach: bool | None) -> None:
    """Refuses two ways at once.

    Raises:
        UsageError: if both are asked for.
    """
    if fused and foreach:
        raise UsageError("`fused` and `foreach` (both True) exclude each other; choose one.")


def choose_way(options: dict[str, Any], device: torch.device) -> Way:
    """How a batch is computed: as asked for, or the fastest that its device has."""
    fused, foreach = options["fused"], options["foreach"]
    if fused is None and foreach is None:
        fused = device.type in ("cpu", "cuda")
        foreach = not fused
    return "fused" if fused else "foreach" if foreach else "plain"


def flats_of(batch: Batch, *slots: str) -> list[list[Tensor]] | None:
    """Weights, gradients and slots of the leaves, each as a list of flat tensors.

    Gradients have the weights' dtype. None if a weight is not dense.
    """
    rows = [leaf.flat(*slots) for leaf in batch.leaves]
    dense = [row for row in rows if row is not None]
    return (
        [list(column) for column in zip(*dense, strict=True)] if len(dense) == len(rows) else None
    )


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same pieces of flat tensors, each small enough for the cache."""
    size = tensors[0].numel()
    if size <= BLOCK_ELEMENTS:
        return iter([tensors])
    sizes = [min(BLOCK_ELEMENTS, size - begin) for begin in range(0, size, BLOCK_ELEMENTS)]
    # One call into C++ for each tensor; `torch.split` spends longer in Python than it splits.
    return zip(*(tensor.split_with_sizes(sizes) for tensor in tensors), strict=True)


def combine(sums: list[float], norm: Norm) -> float:
    """The sum over a tensor from those of its blocks."""
    if norm != "linf":
        return math.fsum(sums)
    # The larger of 1 and NaN is whichever comes first.
    return math.nan if any(map(math.isnan, sums)) else max(sums, default=0.0)
