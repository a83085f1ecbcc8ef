"""The trust ratio of a layer, and its norms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allstep.device import is_accelerator
from allstep.optim.checks import Norm, check_values
from allstep.optim.leaves import flat

_SUM_ELEMENTS = 2**20


@dataclass(frozen=True, kw_only=True)
class TrustRatio:
    """Options of the trust ratio, by which norms of weights and update scale a layer's rate.

    ratio = coefficient * clamp(norm(weights), *weight_norm_bounds) / (norm(update) + eps)

    and 1 where the numerator or norm(update) is zero.

    Args:
        norm: "l2", "l1" or "linf", for weights and updates alike; the same for all groups.
        coefficient: factor of every ratio (LARS's eta).
        eps: added to the denominator.
        clip: the largest ratio, or None.
        weight_norm_bounds: (low, high) that the norm of the weights is kept between (LAMB's phi).
        always_adapt: if False, groups without weight decay have a ratio of 1.

    Raises:
        UsageError: if a value is out of range.

    Source: You et al., 2020, arXiv:1904.00962, Algorithm 2 (phi); You et al., 2017,
    arXiv:1708.03888 (coefficient).
    """

    norm: Norm = "l2"
    coefficient: float = 1.0
    eps: float = 0.0
    clip: float | None = None
    weight_norm_bounds: tuple[float, float] = (0.0, math.inf)
    always_adapt: bool = True

    def __post_init__(self) -> None:
        check_values(vars(self))

    def group_options(self) -> dict[str, Any]:
        """The fields as a parameter group keeps them: plain values, named `trust_...`."""
        return {f"trust_{name}": value for name, value in vars(self).items()}


def trust_ratio(
    weight_norm: Tensor,
    update_norm: Tensor,
    options: Mapping[str, Any],
    weight_decay: float = 0.0,
) -> Tensor:
    """The factor of a layer's learning rate; see `TrustRatio`.

    Args:
        weight_norm: norms of the layers' weights, any shape.
        update_norm: norms of the layers' updates (LAMB) or gradients (LARS), the same shape.
        options: what `TrustRatio.group_options` gives, or a parameter group.
        weight_decay: times `weight_norm`, it joins the denominator: for decay that is part of the
            update but not of `update_norm` (LARS).

    Returns:
        The ratios, in the norms' shape.

    >>> options = TrustRatio(coefficient=0.001).group_options()
    >>> trust_ratio(torch.tensor([2.0, 0.0]), torch.tensor([0.5, 0.5]), options)
    tensor([0.0040, 1.0000])
    """
    # A step has one call for each large layer: what changes nothing is left out.
    bounds, coefficient = options["trust_weight_norm_bounds"], options["trust_coefficient"]
    eps, clip = options["trust_eps"], options["trust_clip"]
    scale = weight_norm if tuple(bounds) == (0.0, math.inf) else weight_norm.clamp(*bounds)
    scale = scale if coefficient == 1 else coefficient * scale
    size = update_norm if eps == 0 else update_norm + eps
    size = size if weight_decay == 0 else size + weight_decay * weight_norm
    # Norms that are not numbers are not zero, so the ratio shows them.
    ratio = (scale / size).masked_fill_((scale == 0) | (update_norm == 0), 1.0)
    return ratio if clip is None else ratio.clamp(max=clip)


def power_sum(x: Tensor, norm: Norm) -> float:
    """The additive part of a norm: the norm before its root, which sums over a tensor's parts.

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
        # (the last bit of a dot product depends on where in memory its factors begin)
        total = sum([torch.linalg.vector_norm(part).item() ** 2 for part in parts])
        # ... and squares may overflow, or lose digits on their way to 0.
        return total if 1e-30 < total < math.inf else x.double().square().sum().item()
    order = 1 if norm == "l1" else math.inf
    size: float = torch.linalg.vector_norm(x, order, dtype=torch.float64).item()
    return size


def power_sums(tensors: list[Tensor], norm: Norm) -> Tensor:
    """`power_sum` of each tensor, in double precision; a few kernels on a GPU."""
    if not is_accelerator(tensors[0].device):
        return torch.tensor([power_sum(x, norm) for x in tensors], dtype=torch.float64)
    norms = torch._foreach_norm(tensors, {"l1": 1, "l2": 2, "linf": math.inf}[norm])
    sums = torch.stack(norms).double()
    return sums.square() if norm == "l2" else sums


def norms_of(power_sums: Tensor, norm: Norm) -> Tensor:
    """Norms from sums (or maxima) over all parts."""
    return power_sums.sqrt() if norm == "l2" else power_sums
