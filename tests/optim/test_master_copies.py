"""Half-precision parameters are updated through float32 master copies."""

import pytest
import torch
from torch import nn

from allstep.optim import (
    LAMB,
)
from tests.helpers.compare import equal
from tests.optim.table import Make, for_all, parameters, set_gradients, train


@for_all
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_step_is_the_rounded_float32_step(make: Make, dtype: torch.dtype) -> None:
    """Small steps add up in the master; without it they are rounded away."""
    half, single = parameters(dtype), parameters(dtype)
    for parameter in single:
        parameter.data = parameter.data.float()
    optimizer, oracle = make(half, lr=1e-4), make(single, lr=1e-4)
    for step in range(30):
        set_gradients(half, step)
        for parameter, twin in zip(half, single, strict=True):
            assert parameter.grad is not None
            twin.grad = parameter.grad.float()
        optimizer.step()
        oracle.step()
    assert equal([p.detach() for p in half], [p.detach().to(dtype) for p in single])
    for parameter, twin in zip(half, single, strict=True):
        assert torch.equal(optimizer.state[parameter]["master"], twin.detach())


@for_all
def test_master_follows_a_write_under_no_grad(make: Make) -> None:
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    train(optimizer, params, 2)
    kept = optimizer.state[params[0]]["master"].clone()
    with torch.no_grad():
        params[0][0].fill_(3.0)
    set_gradients(params, 2)
    params[0].grad = torch.zeros_like(params[0])
    for group in optimizer.param_groups:
        group["lr"] = 1e-30
    optimizer.step()
    master = optimizer.state[params[0]]["master"]
    # What momentum is left goes on.
    torch.testing.assert_close(master[0], torch.full((5,), 3.0), rtol=0, atol=0.3)
    torch.testing.assert_close(master[1:], kept[1:], rtol=0, atol=0.3)


def test_master_keeps_digits_where_the_parameter_was_not_written() -> None:
    params = parameters(torch.bfloat16)
    optimizer = LAMB(params)
    train(optimizer, params, 2)
    kept = optimizer.state[params[0]]["master"].clone()
    params[0].data[0] = 3.0
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, params, 1)
    kept[0] = 3.0
    assert torch.equal(optimizer.state[params[0]]["master"], kept)


@for_all
def test_master_follows_a_write_through_data(make: Make) -> None:
    """Through `.data`, as `vector_to_parameters` and averages of weights write."""
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    train(optimizer, params, 1)
    total = sum(parameter.numel() for parameter in params)
    nn.utils.vector_to_parameters(torch.full((total,), 5.0, dtype=torch.bfloat16), params)
    for group in optimizer.param_groups:
        group["lr"] = 1e-30
    step_on_zero_gradients(optimizer, params)
    for parameter in params:  # what momentum is left goes on
        torch.testing.assert_close(
            parameter.detach(), torch.full_like(parameter, 5.0), rtol=0, atol=0.3
        )


def step_on_zero_gradients(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
