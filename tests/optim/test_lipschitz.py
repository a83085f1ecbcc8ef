"""The claim behind layer-wise rates: one stiff layer must not hold back all others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from allstep.optim import LAMB, LARS, Adam, LayerWise, SGDRule, TrustRatio, poly

NUM_STEPS = 60
STIFF = (1e4, 1.0, 1.0)
ALIKE = (1.0, 1.0, 1.0)

Make = Callable[[list[nn.Parameter], float], Optimizer]


def vectors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(20, generator=generator, dtype=torch.float64) for _ in STIFF]


def distance(make: Make, lr: float, curvatures: tuple[float, ...]) -> float:
    """What is left of |x - end|**2 after minimising the sum of L_i * |x_i - end_i|**2 / 2."""
    params, ends = [nn.Parameter(x) for x in vectors(0)], vectors(1)
    optimizer, schedule = make(params, lr), poly(NUM_STEPS, power=1.0)
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = lr * schedule(step)
        for parameter, curvature, end in zip(params, curvatures, ends, strict=True):
            parameter.grad = curvature * (parameter.detach() - end)
        optimizer.step()
    left = [(x.detach() - end).square().sum() for x, end in zip(params, ends, strict=True)]
    return float(torch.stack(left).sum())


def best(make: Make, curvatures: tuple[float, ...] = STIFF) -> float:
    """Over rates from 1e-5 to 1, three a decade; those that diverge are not best."""
    found = [distance(make, 10 ** (k / 3), curvatures) for k in range(-15, 1)]
    return min(value for value in found if value == value)


def sgd(params: list[nn.Parameter], lr: float) -> Optimizer:
    return SGD(params, lr)


@pytest.mark.parametrize(
    "make",
    [
        lambda params, lr: LayerWise(params, SGDRule(), lr),
        lambda params, lr: LARS(params, lr, momentum=0.0, trust_ratio=TrustRatio()),
        lambda params, lr: LAMB(params, lr, weight_decay=0.0),
        lambda params, lr: LayerWise(params, Adam(), lr),
    ],
)
def test_layer_wise_rates_beat_the_best_single_rate(make: Make) -> None:
    """A single rate is bound by the stiff block; the other two hardly move."""
    assert best(make) < best(sgd) / 100


def test_control_without_a_stiff_block() -> None:
    """The gain above comes from the stiffness, not from the optimizer."""
    assert best(sgd, ALIKE) < 1e-3
    assert best(sgd, STIFF) > 10
