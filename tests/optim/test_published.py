"""Published code with matching switches: rules re-derived here, packages where installed.

Theirs is changed as little as possible: `rate` undoes what a rule does to the rate.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allstep.optim import LAMB, LARS, TrustRatio
from tests.helpers.compare import largest_difference
from tests.optim.table import gradients, parameters, train

NUM_STEPS = 50
TOLERANCE = 1e-12

Update = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


def by_rule(update: Update, num_steps: int = NUM_STEPS) -> list[Tensor]:
    """Parameters after the steps of a rule: update(x, g, state) -> x, where state["t"] counts."""
    values = [p.detach().clone() for p in parameters()]
    states: list[dict[str, Any]] = [{"t": 0} for _ in values]
    for step in range(num_steps):
        for i, gradient in enumerate(gradients(step)):
            states[i]["t"] += 1
            values[i] = update(values[i], gradient, states[i])
    return values


def moments(g: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    state["m"] = state.get("m", torch.zeros_like(g)) * 0.9 + g * 0.1
    state["v"] = state.get("v", torch.zeros_like(g)) * 0.999 + g * g * 0.001
    return state["m"], state["v"]


def tensorflow_addons(x: Tensor, g: Tensor, state: dict[str, Any], *, exclude: bool) -> Tensor:
    """tensorflow_addons/optimizers/lamb.py: excluded from decay is excluded from adaptation."""
    m, v = moments(g, state)
    m_hat, v_hat = m / (1 - 0.9 ** state["t"]), v / (1 - 0.999 ** state["t"])
    update = m_hat / (v_hat.sqrt() + 1e-6)
    ratio = 1.0
    if not exclude:
        update = update + 0.01 * x
        w_norm, u_norm = x.norm(2), update.norm(2)
        ratio = float(w_norm / u_norm) if w_norm > 0 and u_norm > 0 else 1.0
    return x - ratio * 0.01 * update


def google_bert(x: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    """The LAMB of Google's BERT and of version 3 of the paper: no bias correction."""
    m, v = moments(g, state)
    update = m / (v.sqrt() + 1e-6) + 0.01 * x
    w_norm, u_norm = x.norm(2), update.norm(2)
    ratio = float(w_norm / u_norm) if w_norm > 0 and u_norm > 0 else 1.0
    return x - ratio * 0.01 * update


def cybertronai(x: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    """pytorch-lamb: the weights' norm is clamped to 0 .. 10, no bias correction."""
    m, v = moments(g, state)
    weight_norm = x.pow(2).sum().sqrt().clamp(0, 2)  # 2 in place of 10, so that it binds
    step = m / v.sqrt().add(1e-6)
    step = step.add(x, alpha=0.01)
    step_norm = step.pow(2).sum().sqrt()
    ratio = 1.0 if weight_norm == 0 or step_norm == 0 else float(weight_norm / step_norm)
    return x.add(step, alpha=-0.01 * ratio)


def timm(x: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    """timm/optim/lamb.py with trust_clip, its gradient clipping off."""
    m, v = moments(g, state)
    denominator = v.sqrt() / math.sqrt(1 - 0.999 ** state["t"]) + 1e-6
    update = (m / (1 - 0.9 ** state["t"])) / denominator + 0.01 * x
    w_norm, u_norm = x.norm(2.0), update.norm(2.0)
    ratio = float(w_norm / u_norm) if w_norm > 0 and u_norm > 0 else 1.0
    return x - 0.01 * min(ratio, 1.0) * update


def mlperf(x: Tensor, g: Tensor, state: dict[str, Any], *, nesterov: bool) -> Tensor:
    """lars_optimizer.py of MLPerf's ResNet: the rate is inside a momentum of negative sign."""
    w_norm, g_norm = x.norm(2), g.norm(2)
    ratio = 1.0
    if w_norm > 0 and g_norm > 0:
        ratio = float(0.001 * w_norm / (g_norm + 1e-4 * w_norm + 1e-7))
    scaled = 2.0 * ratio * (g + 1e-4 * x)
    state["mom"] = 0.9 * state.get("mom", torch.zeros_like(x)) - scaled
    return x + (0.9 * state["mom"] - scaled if nesterov else state["mom"])


def ours(make: Callable[[list[nn.Parameter]], Any]) -> list[Tensor]:
    params = parameters()
    return train(make(params), params, NUM_STEPS)


def bounded_lamb(params: list[nn.Parameter]) -> LAMB:
    ratio = TrustRatio(weight_norm_bounds=(0.0, 2.0))
    return LAMB(params, 0.01, bias_correction=False, trust_ratio=ratio)


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (lambda *a: tensorflow_addons(*a, exclude=False), lambda p: LAMB(p, 0.01)),
        (
            lambda *a: tensorflow_addons(*a, exclude=True),
            lambda p: LAMB(p, 0.01, weight_decay=0.0, trust_ratio=TrustRatio(always_adapt=False)),
        ),
        (google_bert, lambda p: LAMB(p, 0.01, bias_correction=False)),
        (cybertronai, bounded_lamb),
        (timm, lambda p: LAMB(p, 0.01, trust_ratio=TrustRatio(clip=1.0))),
        (
            lambda *a: mlperf(*a, nesterov=False),
            lambda p: LARS(p, 2.0, weight_decay=1e-4, variant="mlperf"),
        ),
        (
            lambda *a: mlperf(*a, nesterov=True),
            lambda p: LARS(p, 2.0, weight_decay=1e-4, variant="mlperf", nesterov=True),
        ),
    ],
    ids=["addons", "addons excluded", "bert", "cybertronai", "timm", "mlperf", "mlperf nesterov"],
)
def test_against_published_rules(rule: Update, make: Callable[[list[nn.Parameter]], Any]) -> None:
    assert largest_difference(ours(make), by_rule(rule)) < TOLERANCE


def test_control_published_rules_differ() -> None:
    rules: list[Update] = [
        lambda *a: tensorflow_addons(*a, exclude=False),
        lambda *a: tensorflow_addons(*a, exclude=True),
        google_bert,
        cybertronai,
        timm,
    ]
    found = [by_rule(rule) for rule in rules]
    for i, first in enumerate(found):
        assert all(largest_difference(first, second) > 1e-4 for second in found[:i])


def theirs(make: Callable[[list[nn.Parameter]], Any]) -> list[Tensor]:
    """Their step may change gradients, so each gets its own."""
    params = parameters()
    return train(make(params), params, NUM_STEPS)


def test_against_pytorch_optimizer_lamb() -> None:
    peer = pytest.importorskip("pytorch_optimizer", reason="needs the extra bench")

    def make(params: list[nn.Parameter]) -> Any:
        options = {"weight_decay": 0.01, "weight_decouple": False, "adam_debias": True}
        return peer.Lamb(params, 0.01, **options)

    ratio = TrustRatio(weight_norm_bounds=(0.0, 10.0), eps=1e-6)
    matching = ours(lambda p: LAMB(p, 0.01, bias_correction=False, trust_ratio=ratio))
    assert largest_difference(theirs(make), matching) < TOLERANCE


def test_against_pytorch_optimizer_lars() -> None:
    """Its rate is outside the momentum, which is the same at a constant rate."""
    peer = pytest.importorskip("pytorch_optimizer", reason="needs the extra bench")
    found = theirs(lambda p: peer.LARS(p, 2.0, weight_decay=0.1))

    def make(params: list[nn.Parameter]) -> Any:
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim <= 1], "adapt": False},
        ]
        return LARS(groups, 2.0)

    # Where the gradient is zero it decays by the largest ratio, the paper's rule by 1.
    keep = [0, 1, 2, 4]
    expected = ours(make)
    assert largest_difference([found[i] for i in keep], [expected[i] for i in keep]) < TOLERANCE


def test_against_torch_optimizer_lamb() -> None:
    peer = pytest.importorskip("torch_optimizer", reason="needs the extra bench")
    found = theirs(lambda p: peer.Lamb(p, 0.01, weight_decay=0.01, clamp_value=2.0))
    assert largest_difference(found, ours(bounded_lamb)) < TOLERANCE


def test_against_torch_optimizer_lars() -> None:
    peer = pytest.importorskip("torch_optimizer", reason="needs the extra bench")
    options = {"momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.001, "eps": 1e-3}
    found = theirs(lambda p: peer.LARS(p, 2.0, **options))
    ratio = TrustRatio(coefficient=0.001, eps=1e-3)
    expected = ours(lambda p: LARS(p, 2.0, weight_decay=0.1, trust_ratio=ratio))
    # Where a norm is zero it does not decay; the paper's rule does.
    keep = [0, 1, 2]
    assert largest_difference([found[i] for i in keep], [expected[i] for i in keep]) < TOLERANCE
