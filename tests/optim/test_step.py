"""`step()` of every optimizer: torch's conventions, and gradients left as they are."""

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.compare import equal, largest_difference
from tests.optim.table import Make, for_all, gradients, parameters, set_gradients, train


@for_all
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_step_leaves_gradients_bit_for_bit(make: Make, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = make(params, weight_decay=0.1, maximize=True)
    for step in range(3):
        set_gradients(params, step)
        kept = [parameter.grad for parameter in params]
        before = [gradient.clone() for gradient in kept if gradient is not None]
        optimizer.step()
        assert all(
            parameter.grad is gradient for parameter, gradient in zip(params, kept, strict=True)
        )
        assert equal([gradient for gradient in kept if gradient is not None], before)


@for_all
def test_maximize_is_descent_of_the_negative_gradient(make: Make) -> None:
    up, down = parameters(), parameters()
    ascent, descent = make(up, weight_decay=0.1, maximize=True), make(down, weight_decay=0.1)
    for step in range(5):
        for parameter, twin, gradient in zip(up, down, gradients(step), strict=True):
            parameter.grad, twin.grad = gradient, -gradient
        ascent.step()
        descent.step()
    assert largest_difference([p.detach() for p in up], [p.detach() for p in down]) < 1e-14


@for_all
def test_tensor_lr_is_number_lr(make: Make) -> None:
    numbers, tensors = parameters(), parameters()
    expected = train(make(numbers, lr=0.02), numbers, 5)
    lr = torch.tensor(0.02, dtype=torch.float64)
    found = train(make(tensors, lr=lr), tensors, 5)
    assert largest_difference(found, expected) < 1e-14


@for_all
def test_closure_runs_with_gradients_enabled(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((parameter.square().sum() for parameter in params), torch.zeros(()))
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True] and float(loss.detach()) > 0


@for_all
def test_groups_with_own_options_are_separate_optimizers(make: Make) -> None:
    """Two groups in one optimizer are two optimizers."""
    together, apart = parameters(), parameters()
    optimizer = make([{"params": together[:2], "lr": 0.03}], weight_decay=0.1)
    optimizer.add_param_group({"params": together[2:], "weight_decay": 0.5})
    found = train(optimizer, together, 5)
    first, second = make(apart[:2], lr=0.03, weight_decay=0.1), make(apart[2:], weight_decay=0.5)
    for step in range(5):
        set_gradients(apart, step)
        first.step()
        second.step()
    assert largest_difference(found, [p.detach() for p in apart]) < 1e-14


@for_all
def test_parameters_without_a_gradient_are_left_out(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    optimizer.step()
    assert not optimizer.state
    set_gradients(params, 0)
    params[0].grad = None
    before = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0].detach(), before) and params[0] not in optimizer.state


@for_all
def test_step_takes_any_memory_layout(make: Make) -> None:
    """Transposed, channels-last and non-dense weights, and gradients that lie otherwise."""

    def odd() -> list[nn.Parameter]:
        made = parameters()
        made[0].data = made[0].data.t().contiguous().t()
        made[2].data = made[2].data.to(memory_format=torch.channels_last)
        made[4].data = torch.zeros(4, 6, dtype=torch.float64)[:, ::2]
        return made

    plain, strange = parameters(), odd()
    expected = train(make(plain, weight_decay=0.1), plain, 5)
    found = train(make(strange, weight_decay=0.1), strange, 5)
    assert largest_difference(found, expected) < 1e-13


@for_all
def test_batch_size_does_not_mix_groups(make: Make) -> None:
    """As optimizers of their own would; groups differ in rate and decay, and one in dtype."""
    options = [{"lr": 0.1, "weight_decay": 0.01}, {"lr": 0.02}, {"lr": 0.05, "weight_decay": 0.3}]
    parts = [slice(0, 3), slice(3, 4), slice(4, 5)]

    def mixed() -> list[nn.Parameter]:
        params = parameters(torch.float32)
        return [*params[:2], nn.Parameter(params[2].detach().double()), *params[3:]]

    def together(max_elements: int | None) -> list[Tensor]:
        params = mixed()
        groups = [{"params": params[part], **o} for part, o in zip(parts, options, strict=True)]
        optimizer = make(groups)
        if max_elements is not None:
            optimizer.batch_elements = max_elements  # type: ignore[attr-defined]
        return train(optimizer, params, 4)

    expected = []
    for part, of_group in zip(parts, options, strict=True):
        params = mixed()
        expected += train(make(params[part], **of_group), params, 4)[part]
    for max_elements in (None, 40, 1):
        assert equal(together(max_elements), expected)
