"""Updates in few passes over memory: torch's fused kernels, block by block on a CPU.

[Note: directions from fused Adam] torch's fused Adam kernel subtracts lr times the bias-corrected
direction from its parameter, in one pass that also moves both moments on. Given a scratch tensor
that holds weight_decay * x as the parameter, and -1 as the rate, it leaves weight_decay * x plus
the direction there: the update that LAMB takes the norm of. On a CPU this is done in blocks, so
that weight, scratch and both norms stay in the cache. A step of infinity switches the correction
off, because beta ** infinity is 0.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from allstep.optim.checks import Norm
from allstep.optim.trust import power_sum

# Smaller blocks stay in closer caches, but start the threads more often; measured on 1 and 2.
BLOCK_ELEMENTS = 2**20


def sums_by_blocks(
    norm: Norm, columns: Sequence[Sequence[Tensor]], advance: Callable[..., Tensor]
) -> Tensor:
    """The directions of whole layers, computed and measured block by block while it is cached.

    Args:
        norm: what the sums are for.
        columns: lists of flat tensors, an entry a layer; the first holds the weights.
        advance: called with a layer's number and its block of each column; makes the block's
            direction and returns it.

    Returns:
        Shape (2, layers), float64: what adds up to the norms of weights and directions.
    """
    sums: list[list[float]] = [[], []]
    for layer, tensors in enumerate(zip(*columns, strict=True)):
        of_blocks: list[list[float]] = [[], []]
        for block in _blocks(tensors):
            of_blocks[0].append(power_sum(block[0], norm))  # reads the weights into the cache
            of_blocks[1].append(power_sum(advance(layer, *block), norm))
        for total, parts in zip(sums, of_blocks, strict=True):
            total.append(_combine(parts, norm))
    return torch.tensor(sums, dtype=torch.float64)


def _blocks(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Equal slices of several flat tensors, each small enough for the cache."""
    size = tensors[0].numel()
    if size <= BLOCK_ELEMENTS:
        return iter([tensors])
    sizes = [min(BLOCK_ELEMENTS, size - begin) for begin in range(0, size, BLOCK_ELEMENTS)]
    # One call into C++ for each tensor; `torch.split` spends longer in Python than it splits.
    return zip(*(tensor.split_with_sizes(sizes) for tensor in tensors), strict=True)


def _combine(sums: list[float], norm: Norm) -> float:
    """A tensor's sum, from the sums of its blocks."""
    if norm != "linf":
        return math.fsum(sums)
    # The larger of 1 and NaN is whichever comes first.
    return math.nan if any(map(math.isnan, sums)) else max(sums, default=0.0)
