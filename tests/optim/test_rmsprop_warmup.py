"""RMSpropWarmup: the rate during and after its transition, and groups that join."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from allstep.errors import UsageError
from allstep.optim import (
    RMSpropWarmup,
)
from tests.helpers.compare import equal, largest_difference
from tests.optim.table import one, parameters, set_gradients, train


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_lr_of_zero_during_the_transition(lr: Any) -> None:
    params = parameters()
    optimizer = RMSpropWarmup(params, lr, center_steps=5, period_steps=5)
    set_gradients(params, 0)
    with pytest.raises(UsageError, match=r"`lr` \(=0.0\) must be positive during the transition"):
        optimizer.step()


def test_distributed_checkpoint_makes_the_state_with_lr_zero() -> None:
    """As torch's distributed checkpoints have every optimizer do."""
    model = nn.Linear(4, 2)
    optimizer = RMSpropWarmup(model.parameters(), 0.1, center_steps=5, period_steps=2)
    before = copy.deepcopy(model.state_dict())
    saved = get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]["weight"]) == {"step", "square_avg", "delta"}
    assert equal(list(before.values()), list(model.state_dict().values()))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr_of_one_element(fused: bool, shape: tuple[int, ...]) -> None:
    params, twin = parameters(), parameters()
    options = {"center_steps": 5, "period_steps": 5, "fused": fused}
    found = train(RMSpropWarmup(params, torch.full(shape, 0.1), **options), params, 3)
    expected = train(RMSpropWarmup(twin, 0.1, **options), twin, 3)
    assert largest_difference(found, expected) < 1e-7


def test_lr_of_zero_after_the_transition() -> None:
    params = parameters()
    optimizer = RMSpropWarmup(params, 0.1, center_steps=1, period_steps=2)
    train(optimizer, params, 4)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in params]
    assert equal(train(optimizer, params, 1), before)


@pytest.mark.parametrize("fused", [True, False])
def test_added_group_is_at_the_step_of_the_first(fused: bool) -> None:
    """At its end a new group makes a step of SGD, not one of RMSprop."""
    params, (late,) = parameters(), one()
    optimizer = RMSpropWarmup(params, 0.1, center_steps=1, period_steps=2, fused=fused)
    train(optimizer, params, 4)
    optimizer.add_param_group({"params": [late]})
    before, late.grad = late.detach().clone(), torch.full_like(late, 3.0)
    optimizer.step()
    torch.testing.assert_close(late.detach(), before - 0.1 * 3.0)
