"""Gradients that are not finite: raise, skip, propagate."""

import copy
from functools import partial
from typing import Literal

import pytest
import torch
from torch import nn

from allstep.optim import (
    LAMB,
    LARS,
    NonfiniteGradientError,
    TrustRatio,
)
from tests.helpers.compare import equal
from tests.optim.table import Make, for_all, parameters, set_gradients, train


def bad_gradient(params: list[nn.Parameter], value: float = float("nan")) -> None:
    set_gradients(params, 9)
    assert params[1].grad is not None
    params[1].grad[2] = value


@for_all
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_raise_names_the_parameter(make: Make, value: float) -> None:
    params = parameters()
    optimizer = make(params)
    train(optimizer, params, 1)
    before = params[1].detach().clone()
    bad_gradient(params, value)
    message = r"gradient of param_groups\[0\]\['params'\]\[1\], .* is not finite"
    with pytest.raises(NonfiniteGradientError, match=message):
        optimizer.step()
    assert torch.equal(params[1].detach(), before)


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
@pytest.mark.parametrize("make", [LAMB, partial(LARS, variant="lamb_paper")], ids=["lamb", "lars"])
def test_raise_names_a_layer_measured_in_blocks(make: Make, norm: str) -> None:
    """They are measured block by block; here the second is bad."""
    weight = nn.Parameter(torch.ones(2**20 + 5))
    weight.grad = torch.ones_like(weight)
    weight.grad[-1] = float("nan")
    with pytest.raises(NonfiniteGradientError, match="gradient of param_groups"):
        make([weight], lr=0.1, trust_ratio=TrustRatio(norm=norm)).step()
    assert torch.equal(weight.detach(), torch.ones(2**20 + 5))


@pytest.mark.parametrize("variant", ["paper", "mlperf"])
@pytest.mark.parametrize("fused", [True, False])
def test_raise_with_ratio_on_gradient_moves_nothing(
    variant: Literal["paper", "mlperf"], fused: bool
) -> None:
    params = parameters()
    optimizer = LARS(params, lr=0.1, variant=variant, fused=fused)
    optimizer.batch_elements = 4
    train(optimizer, params, 1)
    set_gradients(params, 9)
    assert params[-1].grad is not None
    params[-1].grad[-1] = float("nan")
    before = [parameter.detach().clone() for parameter in params]
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in params]
    with pytest.raises(NonfiniteGradientError, match=rf"\[{len(params) - 1}\]"):
        optimizer.step()
    assert equal([parameter.detach() for parameter in params], before)
    assert equal([optimizer.state[p]["momentum_buffer"] for p in params], momenta)
    assert [optimizer.state[p]["step"].item() for p in params] == [1] * len(params)


def test_raise_uses_given_parameter_names() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = LARS(list(model.named_parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    with pytest.raises(NonfiniteGradientError, match=r"0.weight, .*, 2.weight and 3 more"):
        optimizer.step()


@for_all
def test_skip_leaves_out_and_counts_the_step(make: Make) -> None:
    params, clean = parameters(), parameters()
    optimizer, oracle = make(params, nonfinite="skip"), make(clean)
    train(optimizer, params, 2)
    bad_gradient(params)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.step()
    assert optimizer.num_skipped == 1  # type: ignore[attr-defined]
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)
    found = train(optimizer, params, 2, first=2)
    assert equal(found, train(oracle, clean, 4))
    assert optimizer.state_dict()["param_groups"][0]["num_skipped"] == 1


@for_all
def test_propagate_does_not_look(make: Make) -> None:
    params = parameters()
    optimizer = make(params, nonfinite="propagate")
    bad_gradient(params)
    optimizer.step()
    assert bool(params[1].isnan().any()) and bool(params[0].isfinite().all())


@for_all
def test_skip_accepts_finite_gradients_with_an_infinite_sum(make: Make) -> None:
    """Their sum is infinite in single precision; they are not."""
    params = parameters(torch.float32)
    optimizer = make(params, nonfinite="skip")
    for parameter in params:
        parameter.grad = torch.full_like(parameter, 3e38)
    optimizer.step()
    assert optimizer.num_skipped == 0  # type: ignore[attr-defined]
    params[1].grad[0] = float("inf")
    optimizer.step()
    assert optimizer.num_skipped == 1  # type: ignore[attr-defined]
