"""Compares each layer's curvature with the step that LARS and LAMB would make in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allstep.train.curvature import Objective, top_eigenvalue


@dataclass(frozen=True, kw_only=True)
class LayerSharpness:
    """Measurements of one parameter tensor of a model; norms are L2.

    Attributes:
        name: the parameter's name.
        num_parameters: number of its elements.
        weight_norm: norm of its values.
        gradient_norm: norm of the mean loss's gradient.
        gradient_density: |g|_1^2 / (num_parameters |g|_2^2): 1 if all elements have one magnitude,
            1 / num_parameters if a single one is not zero.
        gradient_noise: root of the summed variances of its elements from micro-batch to
            micro-batch.
        top_eigenvalue: largest eigenvalue of the loss's Hessian in this parameter only; the
            gradient's Lipschitz constant there if it is also the largest in magnitude.
        residual: the eigenvalue's residual, as in `Sharpness`.

    Source: You et al., 2020, arXiv:1904.00962 (a Lipschitz constant for each layer); Bernstein et
    al., 2018, arXiv:1802.04434 (density).
    """

    name: str
    num_parameters: int
    weight_norm: float
    gradient_norm: float
    gradient_density: float
    gradient_noise: float
    top_eigenvalue: float
    residual: float

    @property
    def lars_ratio(self) -> float:
        """weight_norm / gradient_norm, by which LARS multiplies a layer's learning rate."""
        return self.weight_norm / self.gradient_norm if self.gradient_norm else math.nan

    @property
    def lamb_ratio(self) -> float:
        """weight_norm / sqrt(num_parameters), LAMB's ratio in its first step, of signs."""
        return self.weight_norm / math.sqrt(self.num_parameters)


def measure_layers(
    objective: Objective, *, max_products: int, tolerance: float, seed: int
) -> tuple[LayerSharpness, ...]:
    """Measures every parameter tensor of a model separately. Collective.

    Args:
        objective: the loss, as a function of all parameters.
        max_products, tolerance, seed: for each eigenvalue, as in `sharpness`.
    """
    sizes = [p.numel() for p in objective.parameters]
    gradients, variances = (torch.split(x, sizes) for x in objective.gradient())
    return tuple(
        _measure(objective.of(name), name, gradient, variance, max_products, tolerance, seed)
        for name, gradient, variance in zip(objective.names, gradients, variances, strict=True)
    )


def _measure(
    objective: Objective,
    name: str,
    gradient: Tensor,
    variance: Tensor,
    max_products: int,
    tolerance: float,
    seed: int,
) -> LayerSharpness:
    (weight,) = objective.parameters
    eigenvalue, residual, _ = top_eigenvalue(
        objective, max_products=max_products, tolerance=tolerance, seed=seed
    )
    return LayerSharpness(
        name=name,
        num_parameters=weight.numel(),
        weight_norm=float(weight.detach().double().norm()),
        gradient_norm=float(gradient.norm()),
        gradient_density=density(gradient),
        gradient_noise=math.sqrt(float(variance.sum())),
        top_eigenvalue=eigenvalue,
        residual=residual,
    )


def density(values: Tensor | Sequence[float]) -> float:
    """The fraction of numbers that contribute to a norm: |v|_1^2 / (n |v|_2^2).

    Args:
        values: n numbers.

    Returns:
        1 if all have one magnitude, 1 / n if a single one is not zero; NaN if all are zero.

    >>> density([3.0, -3.0, 0.0, 0.0])
    0.5

    Source: Bernstein et al., 2018, arXiv:1802.04434, section 3.3.
    """
    v = torch.as_tensor(values, dtype=torch.float64)
    squares = float(v.square().sum())
    return float(v.abs().sum()) ** 2 / (v.numel() * squares) if squares else math.nan


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's correlation: 1 if both numbers rise together, -1 if one falls as the other rises.

    Args:
        pairs: finite numbers; equal ones share the mean of their ranks.

    Returns:
        The correlation of the ranks; NaN for fewer than three pairs, or if one side is constant.

    >>> rank_correlation([(1.0, 10.0), (2.0, 1000.0), (3.0, 100.0)])
    0.5

    Source: Spearman, 1904, The American Journal of Psychology 15.
    """
    if len(pairs) < 3:
        return math.nan
    ranks = torch.stack([_ranks(side) for side in torch.tensor(pairs, dtype=torch.float64).T])
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


def _ranks(values: Tensor) -> Tensor:
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    return below + (equal - 1).double() / 2
