"""Every optimizer and way of computing it, for tests that hold for all."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.optim import LAMB, LARS, Adam, LayerWise, RMSpropWarmup, SGDRule

Make = Callable[..., Optimizer]

SHAPES = ((7, 5), (5,), (3, 4, 2, 2), (1, 1), (4, 3))
WAYS: tuple[dict[str, bool], ...] = ({"fused": False}, {"fused": True})


def _warmup(params: Any, lr: Any = 0.01, **options: Any) -> Optimizer:
    return RMSpropWarmup(params, lr, **{"center_steps": 6, "period_steps": 8, **options})


def _layer_wise(params: Any, lr: Any = 0.01, **options: Any) -> Optimizer:
    return LayerWise(params, Adam(), lr, **options)


def _layer_wise_gradient(params: Any, lr: Any = 0.01, **options: Any) -> Optimizer:
    return LayerWise(params, SGDRule(momentum=0.9), lr, ratio_on="gradient", **options)


def _lars(variant: Any, **fixed: Any) -> Make:
    def make(params: Any, lr: Any = 0.01, **options: Any) -> Optimizer:
        return LARS(params, lr, variant=variant, **fixed, **options)

    return make


def _with(make: Make, **fixed: Any) -> Make:
    return lambda params, lr=0.01, **options: make(params, lr, **fixed, **options)


OPTIMIZERS: dict[str, Make] = {
    "layer_wise": _layer_wise,
    "layer_wise_gradient": _layer_wise_gradient,
    **{f"lamb {way}": _with(LAMB, **way) for way in WAYS},
    **{f"lars {way}": _lars("paper", **way) for way in WAYS},
    **{f"lars mlperf {way}": _lars("mlperf", **way) for way in WAYS},
    **{f"lars lamb_paper {way}": _lars("lamb_paper", **way) for way in WAYS},
    **{f"warmup {way}": _with(_warmup, **way) for way in WAYS},
}
"""All take (params, lr, **options); all options that the test needs are common to all."""

for_all = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    """Random weights of several shapes; the last are zero, where a ratio must be 1."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    made[-1].zero_()
    return [nn.Parameter(x.to(dtype)) for x in made]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Those of one step; the fourth parameter's is always zero."""
    generator = torch.Generator().manual_seed(1000 + step)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    made[3].zero_()
    return [x.to(dtype) for x in made]


def set_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    for parameter, gradient in zip(params, gradients(step), strict=True):
        parameter.grad = gradient.to(parameter.dtype)


def train(
    optimizer: Optimizer,
    params: Sequence[nn.Parameter],
    num_steps: int = 50,
    rate: Callable[[int], float] | None = None,
    first: int = 0,
) -> list[Tensor]:
    """Steps with the gradients of `set_gradients`; the parameters afterwards."""
    for step in range(first, first + num_steps):
        set_gradients(params, step)
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in params]


def one() -> list[nn.Parameter]:
    """A single small parameter, for tests of arguments."""
    return [nn.Parameter(torch.ones(2, 2))]
