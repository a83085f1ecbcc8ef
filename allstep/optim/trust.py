"""The trust ratio of a layer, and the norms that it is made of."""

import math
from typing import Literal

import torch
from torch import Tensor

from allstep.optim.leaves import flat

__all__ = ["Norm", "norms_of", "power_sum", "power_sums", "trust_ratio"]

Norm = Literal["l1", "l2", "linf"]

_SUM_ELEMENTS = 2**20


def trust_ratio(
    weight_norm: Tensor,
    update_norm: Tensor,
    *,
    coefficient: float = 1.0,
    weight_decay: float = 0.0,
    phi: tuple[float, float] = (0.0, math.inf),
    eps: float = 0.0,
    clip: float | None = None,
) -> Tensor:
    """By how much the learning rate of a layer is multiplied.

    ratio = coefficient * clamp(weight_norm, *phi) / (update_norm + weight_decay * weight_norm
    + eps), 1 where the numerator or `update_norm` is zero, and at most `clip`

    Args:
        weight_norm: norms of the layers' weights, any shape.
        update_norm: norms of the layers' updates (LAMB) or gradients (LARS), the same shape.
        coefficient: LARS's eta.
        weight_decay: the decay, where it is part of the update but not of `update_norm` (LARS).
        phi: bounds of the weights' norm.
        eps: added to the denominator.
        clip: the largest ratio.

    Returns:
        The ratios, in the norms' shape.

    >>> trust_ratio(torch.tensor([2.0, 0.0]), torch.tensor([0.5, 0.5]), coefficient=0.001)
    tensor([0.0040, 1.0000])

    Source: You et al., 2020, arXiv:1904.00962, Algorithm 2 (phi); You et al., 2017,
    arXiv:1708.03888 (coefficient and weight decay).
    """
    # A step has one call for each large layer: what changes nothing is left out.
    low, high = phi
    scale = weight_norm if (low, high) == (0.0, math.inf) else weight_norm.clamp(low, high)
    scale = scale if coefficient == 1 else coefficient * scale
    size = update_norm if eps == 0 else update_norm + eps
    size = size if weight_decay == 0 else size + weight_decay * weight_norm
    # Norms that are not numbers are not zero, so the ratio shows them.
    ratio = (scale / size).masked_fill_((scale == 0) | (update_norm == 0), 1.0)
    return ratio if clip is None else ratio.clamp(max=clip)


def power_sum(x: Tensor, norm: Norm) -> float:
    """What adds up over the parts of a tensor: its norm before the root.

    Args:
        x: on a CPU, of any shape; may be empty.
        norm: "l2" gives the sum of squares, "l1" that of magnitudes, "linf" the largest
            magnitude, which is to be combined by maximum instead of sum.
    """
    if x.numel() == 0:
        return 0.0
    if norm == "l2":
        row = flat(x)
        row = x.reshape(-1) if row is None else row
        # Sums in single precision lose digits over many elements, ...
        parts = torch.split(row, _SUM_ELEMENTS) if row.numel() > _SUM_ELEMENTS else (row,)
        total = sum([torch.dot(part, part).item() for part in parts])
        # ... and squares may overflow, or lose digits on their way to 0.
        return total if 1e-30 < total < math.inf else x.double().square().sum().item()
    order = 1 if norm == "l1" else math.inf
    size: float = torch.linalg.vector_norm(x, order, dtype=torch.float64).item()
    return size


def power_sums(tensors: list[Tensor], norm: Norm) -> Tensor:
    """`power_sum` of each tensor, in double precision; a few kernels on a GPU."""
    if tensors[0].device.type == "cpu":
        return torch.tensor([power_sum(x, norm) for x in tensors], dtype=torch.float64)
    norms = torch._foreach_norm(tensors, {"l1": 1, "l2": 2, "linf": math.inf}[norm])
    sums = torch.stack(norms).double()
    return sums.square() if norm == "l2" else sums


def norms_of(power_sums: Tensor, norm: Norm) -> Tensor:
    """Norms from sums (or maxima) over all parts."""
    return power_sums.sqrt() if norm == "l2" else power_sums
