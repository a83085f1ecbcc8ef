"""Every optimizer against its formula as written, in numpy and double precision, 50 steps."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from allstep.optim import (
    LAMB,
    LARS,
    Adam,
    LayerWise,
    RMSprop,
    RMSpropWarmup,
    SGDRule,
    TrustRatio,
    sgd_share,
)
from tests.helpers.compare import largest_difference
from tests.optim.table import WAYS, gradients, parameters, train

NUM_STEPS = 50
TOLERANCE = 1e-12

Array = np.ndarray
Formula = Callable[[Array], Iterator[Array]]
NORMS: dict[str, Callable[[Array], float]] = {
    "l1": lambda x: float(np.abs(x).sum()),
    "l2": lambda x: math.sqrt(float((x * x).sum())),
    "linf": lambda x: float(np.abs(x).max()),
}


PLAIN, OF_LARS = TrustRatio(), TrustRatio(coefficient=0.001)
# A norm between equal bounds makes the ratio independent of the weights.
BOUNDED = TrustRatio(coefficient=0.001, weight_norm_bounds=(1.0, 1.0))


def rate(step: int) -> float:
    """Changes at every step, so that where the rate enters is seen."""
    return 0.02 * (1 + step % 7)


def oracle(update: Callable[..., Any], **options: Any) -> list[torch.Tensor]:
    """Parameters after the steps of a formula: update(x, g, state, step, lr, **options) -> x."""
    values = [p.detach().numpy().copy() for p in parameters()]
    states: list[dict[str, Any]] = [{} for _ in values]
    for step in range(NUM_STEPS):
        for i, gradient in enumerate(gradients(step)):
            values[i] = update(
                values[i], gradient.numpy(), states[i], step + 1, rate(step), **options
            )
    return [torch.from_numpy(value) for value in values]


def ratio_of(x_norm: float, u_norm: float, numerator: float, denominator: float) -> float:
    return numerator / denominator if x_norm > 0 and u_norm > 0 else 1.0


def lamb(
    x: Array,
    g: Array,
    state: dict[str, Any],
    t: int,
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    trust_ratio: TrustRatio = PLAIN,
) -> Array:
    """Algorithm 2 of arXiv:1904.00962."""
    b1, b2 = betas
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
    c1, c2 = (1 - b1**t, 1 - b2**t) if bias_correction else (1, 1)
    u = (state["m"] / c1) / (np.sqrt(state["v"] / c2) + eps) + weight_decay * x
    low, high = trust_ratio.weight_norm_bounds
    size = min(max(NORMS[trust_ratio.norm](x), low), high)
    u_norm = NORMS[trust_ratio.norm](u)
    ratio = ratio_of(size, u_norm, size, u_norm + trust_ratio.eps)
    return x - lr * min(ratio, trust_ratio.clip or math.inf) * u


def lars(
    x: Array,
    g: Array,
    state: dict[str, Any],
    t: int,
    lr: float,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_ratio: TrustRatio = OF_LARS,
    nesterov: bool = False,
    momentum_correction: bool = False,
) -> Array:
    """arXiv:1708.03888; with eps the rule of MLPerf."""
    x_norm, g_norm = NORMS[trust_ratio.norm](x), NORMS[trust_ratio.norm](g)
    denominator = g_norm + weight_decay * x_norm + trust_ratio.eps
    ratio = ratio_of(x_norm, g_norm, trust_ratio.coefficient * x_norm, denominator)
    factor = lr / state.get("lr", lr) if momentum_correction else 1.0
    scaled = lr * ratio * (g + weight_decay * x)
    state["v"] = momentum * factor * state.get("v", 0) + scaled
    state["lr"] = lr
    return x - (momentum * state["v"] + scaled if nesterov else state["v"])


def lars_of_lamb_paper(
    x: Array,
    g: Array,
    state: dict[str, Any],
    t: int,
    lr: float,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_ratio: TrustRatio = PLAIN,
) -> Array:
    """Algorithm 1 of arXiv:1904.00962."""
    g = g + weight_decay * x
    state["m"] = momentum * state.get("m", 0) + (1 - momentum) * g
    x_norm, m_norm = NORMS[trust_ratio.norm](x), NORMS[trust_ratio.norm](state["m"])
    return x - lr * ratio_of(x_norm, m_norm, x_norm, m_norm or 1.0) * state["m"]


def warmup(
    x: Array,
    g: Array,
    state: dict[str, Any],
    t: int,
    lr: float,
    *,
    center: float,
    period: float,
    weight_decay: float = 0.0,
) -> Array:
    """arXiv:1711.04325, section 2, with the share of SGD that is continuous."""
    e = t - 1
    if e < center:
        a_sgd = 0.5 * math.exp(2 * (e - center) / period)
    elif e < center + period / 2:
        a_sgd = 0.5 + (e - center) / period
    else:
        a_sgd = 1.0
    a_rms = (1 - a_sgd) * 3e-4 / lr
    g = g + weight_decay * x
    state["m"] = 0.99 * state.get("m", 0) + 0.01 * g * g
    step = (a_sgd + a_rms / (np.sqrt(state["m"]) + 1e-8)) * g
    state["delta"] = 0.9 * state.get("delta", 0) - step
    return x + lr * state["delta"]


LAMB_OPTIONS: list[dict[str, Any]] = [
    {},
    {"betas": (0.66, 0.996)},
    {"eps": 0.1},
    {"weight_decay": 0.3},
    {"bias_correction": False},
    {"trust_ratio": TrustRatio(weight_norm_bounds=(0.0, 0.5))},
    {"trust_ratio": TrustRatio(weight_norm_bounds=(4.0, 10.0))},
    {"trust_ratio": TrustRatio(eps=0.1)},
    {"trust_ratio": TrustRatio(clip=0.3)},
    {"trust_ratio": TrustRatio(norm="l1")},
    {"trust_ratio": TrustRatio(norm="linf")},
]
LARS_OPTIONS: list[dict[str, Any]] = [
    {"weight_decay": 0.1},
    {"momentum": 0.5},
    {"momentum": 0.0},
    {"trust_ratio": TrustRatio(coefficient=0.02)},
    {"trust_ratio": TrustRatio(coefficient=0.001, eps=3.0)},
    {"nesterov": True},
    {"momentum_correction": True},
    {"trust_ratio": TrustRatio(coefficient=0.001, norm="l1")},
    {"trust_ratio": TrustRatio(coefficient=0.001, norm="linf")},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("options", LAMB_OPTIONS, ids=str)
def test_lamb_against_its_formula(options: dict[str, Any], way: dict[str, bool]) -> None:
    params = parameters()
    found = train(LAMB(params, **options, **way), params, NUM_STEPS, rate)
    assert largest_difference(found, oracle(lamb, **options)) < TOLERANCE


@pytest.mark.parametrize("options", LAMB_OPTIONS, ids=str)
def test_lamb_is_layer_wise_adam(options: dict[str, Any]) -> None:
    base = {k: v for k, v in options.items() if k in ("betas", "eps", "bias_correction")}
    rest = {k: v for k, v in options.items() if k not in base}
    general, preset = parameters(), parameters()
    optimizer = LayerWise(general, Adam(**base), **{"weight_decay": 0.01, **rest})
    found = train(LAMB(preset, **options), preset, NUM_STEPS, rate)
    expected = train(optimizer, general, NUM_STEPS, rate)
    assert largest_difference(found, expected) < TOLERANCE


def test_control_lamb_options_differ() -> None:
    """Or else the tests above would not see a switch that does nothing."""
    results = [oracle(lamb, **options) for options in LAMB_OPTIONS]
    for i, first in enumerate(results):
        for second in results[:i]:
            assert largest_difference(first, second) > 1e-6


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("options", [{}, *LARS_OPTIONS], ids=str)
def test_lars_against_its_formula(options: dict[str, Any], way: dict[str, bool]) -> None:
    params = parameters()
    found = train(LARS(params, **options, **way), params, NUM_STEPS, rate)
    assert largest_difference(found, oracle(lars, **options)) < TOLERANCE


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_lars_mlperf_adds_the_keras_epsilon(way: dict[str, bool]) -> None:
    """Seen where gradients are as small as it."""
    small = 1e-7

    def update(x: Array, g: Array, *rest: Any, **options: Any) -> Array:
        return lars(x, small * g, *rest, **options)

    expected = oracle(
        update, weight_decay=1e-7, trust_ratio=TrustRatio(coefficient=0.001, eps=1e-7)
    )
    paper = oracle(update, weight_decay=1e-7)
    params = parameters()
    optimizer = LARS(params, variant="mlperf", weight_decay=1e-7, **way)
    for step in range(NUM_STEPS):
        for parameter, gradient in zip(params, gradients(step), strict=True):
            parameter.grad = small * gradient
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    found = [p.detach() for p in params]
    assert largest_difference(found, expected) < TOLERANCE
    assert largest_difference(paper, expected) > 1e-4


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_lars_mlperf_does_not_decay_groups_with_adapt_false(way: dict[str, bool]) -> None:
    def trained(variant: Any, weight_decay: float) -> list[torch.Tensor]:
        params = parameters()
        group = {"params": params, "adapt": False, "weight_decay": weight_decay}
        return train(LARS([group], variant=variant, **way), params, NUM_STEPS, rate)

    assert largest_difference(trained("mlperf", 0.1), trained("mlperf", 0.0)) == 0
    assert largest_difference(trained("paper", 0.1), trained("paper", 0.0)) > 1e-4


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.5},
        {"trust_ratio": TrustRatio(norm="l1")},
        {"trust_ratio": TrustRatio(norm="linf")},
    ],
)
def test_lars_lamb_paper_against_its_formula(options: dict[str, Any], way: dict[str, bool]) -> None:
    params = parameters()
    found = train(LARS(params, variant="lamb_paper", **options, **way), params, NUM_STEPS, rate)
    assert largest_difference(found, oracle(lars_of_lamb_paper, **options)) < TOLERANCE


def test_control_lars_options_differ() -> None:
    results = [oracle(lars, **options) for options in [{}, *LARS_OPTIONS]]
    results.append(oracle(lars_of_lamb_paper))
    for i, first in enumerate(results):
        for second in results[:i]:
            assert largest_difference(first, second) > 1e-6


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_is_layer_wise_sgd(nesterov: bool) -> None:
    general, preset = parameters(), parameters()
    optimizer = LayerWise(
        general,
        SGDRule(momentum=0.9, nesterov=nesterov),
        weight_decay=0.1,
        ratio_on="gradient",
        trust_ratio=OF_LARS,
        momentum_correction=True,
    )
    expected = train(optimizer, general, NUM_STEPS, rate)
    lars_ = LARS(preset, weight_decay=0.1, nesterov=nesterov, momentum_correction=True)
    assert largest_difference(train(lars_, preset, NUM_STEPS, rate), expected) < TOLERANCE


def test_lars_lamb_paper_is_layer_wise_dampened_sgd() -> None:
    general, preset = parameters(), parameters()
    base = SGDRule(momentum=0.9, dampening=0.9)
    expected = train(LayerWise(general, base, weight_decay=0.1), general, NUM_STEPS, rate)
    lars_ = LARS(preset, variant="lamb_paper", weight_decay=0.1)
    assert largest_difference(train(lars_, preset, NUM_STEPS, rate), expected) < TOLERANCE


def test_layer_wise_rmsprop_against_its_formula() -> None:
    def rmsprop(
        x: Array, g: Array, state: dict[str, Any], t: int, lr: float, weight_decay: float
    ) -> Array:
        g = g + weight_decay * x
        state["v"] = 0.9 * state.get("v", 0) + 0.1 * g * g
        u = g / (np.sqrt(state["v"]) + 1e-8)
        x_norm, u_norm = NORMS["l2"](x), NORMS["l2"](u)
        return x - lr * ratio_of(x_norm, u_norm, x_norm, u_norm or 1.0) * u

    params = parameters()
    optimizer = LayerWise(params, RMSprop(alpha=0.9), weight_decay=0.1)
    found = train(optimizer, params, NUM_STEPS, rate)
    assert largest_difference(found, oracle(rmsprop, weight_decay=0.1)) < TOLERANCE


def test_layer_wise_with_a_rule_of_the_user() -> None:
    class Sign:
        """Sign SGD: no state at all."""

        slots: tuple[str, ...] = ()
        decoupled = True

        def direction(
            self, gradient: torch.Tensor, state: Any, step: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return gradient.sign(), {}

    params, twin = parameters(), parameters()
    found = train(LayerWise(params, Sign()), params, 5, rate)
    # LAMB without memory is sign SGD scaled by the weights.
    lamb_ = LAMB(twin, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    for step in range(5):
        for i, (parameter, gradient) in enumerate(zip(twin, gradients(step), strict=True)):
            # Zero over zero is no direction: leave that parameter out.
            parameter.grad = gradient if i != 3 else None
        lamb_.param_groups[0]["lr"] = rate(step)
        lamb_.step()
    assert largest_difference(found, [p.detach() for p in twin]) < TOLERANCE


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_rmsprop_warmup_against_its_formula(weight_decay: float, fused: bool) -> None:
    params = parameters()
    optimizer = RMSpropWarmup(
        params,
        0.1,
        center_steps=20,
        period_steps=10,
        weight_decay=weight_decay,
        fused=fused,
    )
    found = train(optimizer, params, NUM_STEPS, rate)
    expected = oracle(warmup, center=20, period=10, weight_decay=weight_decay)
    assert largest_difference(found, expected) < TOLERANCE


def test_rmsprop_warmup_begins_as_rmsprop_and_ends_as_momentum_sgd() -> None:
    def trained(center: float) -> list[torch.Tensor]:
        params = parameters()
        optimizer = RMSpropWarmup(params, 0.01, center_steps=center, period_steps=1e-3)
        return train(optimizer, params, 20)

    sgd = parameters()
    expected = train(torch.optim.SGD(sgd, 0.01, momentum=0.9), sgd, 20)
    rms = parameters()
    rmsprop = torch.optim.RMSprop(rms, 3e-4, alpha=0.99, momentum=0.9)
    expected_rms = train(rmsprop, rms, 20)
    # A step whose share of SGD is exp(-2e4) or 1.
    ended = parameters()
    optimizer = RMSpropWarmup(ended, 0.01, center_steps=0, period_steps=1e-3)
    optimizer.param_groups[0]["num_steps"] = 1
    assert largest_difference(train(optimizer, ended, 20), expected) < TOLERANCE
    assert largest_difference(trained(100), expected_rms) < TOLERANCE
    assert largest_difference(expected, expected_rms) > 1e-2
    assert sgd_share(0, 100, 1e-3) == 0.0


def test_momentum_correction_gives_the_velocity_of_the_new_lr() -> None:
    """After a change of rate, momentum holds what the new rate would have made it."""

    def velocity(correct: bool, rates: list[float]) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = LARS([weight], trust_ratio=BOUNDED, momentum_correction=correct)
        for lr in rates:
            optimizer.param_groups[0]["lr"] = lr
            weight.grad = torch.ones(3, dtype=torch.float64)
            optimizer.step()
        return optimizer.state[weight]["momentum_buffer"]

    steady = velocity(True, [0.5, 0.5, 0.5])
    torch.testing.assert_close(velocity(True, [0.1, 0.2, 0.5]), steady)
    assert not torch.allclose(velocity(False, [0.1, 0.2, 0.5]), steady)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "rates", [(0.1, [0.2], 0.5), ([0.1], 0.2, [0.5]), (0.1, 0.2, [0.5])], ids=str
)
def test_momentum_correction_with_rates_that_become_tensors(
    rates: tuple[float | list[float], ...], way: dict[str, bool]
) -> None:
    """A rate may be a number at one step and a tensor of one element at the next."""

    def trained(rates: list[Any]) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(x.double()) for x in (torch.tensor(2.0), torch.ones(3))]
        optimizer = LARS(weights, trust_ratio=BOUNDED, momentum_correction=True, **way)
        for lr in rates:
            optimizer.param_groups[0]["lr"] = lr
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weights

    given = [torch.tensor(lr) if isinstance(lr, list) else lr for lr in rates]
    torch.testing.assert_close(trained(given), trained([0.1, 0.2, 0.5]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_momentum_correction_without_a_gradient(way: dict[str, bool]) -> None:
    """Its velocity is that of a rate which has always been the present one."""

    def velocity(rates: list[float], idle: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        other = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = LARS([weight, other], trust_ratio=BOUNDED, momentum_correction=True, **way)
        for step, lr in enumerate(rates):
            optimizer.param_groups[0]["lr"] = lr
            weight.grad = None if step == idle else torch.ones(3, dtype=torch.float64)
            other.grad = torch.ones(2, dtype=torch.float64)
            optimizer.step()
        return optimizer.state[weight]["momentum_buffer"]

    torch.testing.assert_close(velocity([0.1, 0.5, 0.5], 1), velocity([0.5, 0.5, 0.5], 1))


def test_momentum_correction_keeps_previous_lr_in_place() -> None:
    """A CUDA graph looks where it was when the step was captured."""
    weight = torch.nn.Parameter(torch.ones(3))
    lr = torch.tensor(0.5)
    optimizer = LARS([weight], lr, momentum_correction=True)
    places = set()
    for value in (0.5, 0.25, 0.125):
        lr.fill_(value)
        weight.grad = torch.ones(3)
        optimizer.step()
        previous = optimizer.param_groups[0]["previous_lr"]
        assert previous == value
        places.add(previous.data_ptr())
    assert len(places) == 1


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_momentum_correction_after_lr_zero(way: dict[str, bool]) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = LARS([weight], momentum_correction=True, **way)
    for lr in (0.5, 0.0, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.ones(3, dtype=torch.float64)
        before = weight.detach().clone()
        optimizer.step()
        moved = not torch.equal(before, weight)
        assert moved == (lr > 0)
    assert bool(weight.isfinite().all())
