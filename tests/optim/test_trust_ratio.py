"""Trust ratios: names, groups that do not adapt, extreme norms, momentum correction."""

import pytest
import torch
from torch import nn

from allstep.optim import (
    LAMB,
    LARS,
    TrustRatio,
)
from allstep.optim.trust import power_sum
from tests.helpers.compare import largest_difference
from tests.optim.table import WAYS, gradients, parameters, set_gradients, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_do_not_depend_on_where_in_memory_a_tensor_lies(dtype: torch.dtype) -> None:
    """Gradients of several workers are views of one vector, where a lone worker's are not."""
    for num_elements in (7, 25, 60, 300, 4097):
        values = torch.randn(
            num_elements, dtype=dtype, generator=torch.Generator().manual_seed(num_elements)
        )
        sums = set()
        for offset in range(16):
            x = torch.zeros(num_elements + 16, dtype=dtype)[offset:][:num_elements]
            sums.add(power_sum(x.copy_(values), "l2"))
        assert len(sums) == 1


def test_trust_ratios_are_named_by_parameter_names() -> None:
    model = nn.Linear(3, 2)
    optimizer = LAMB(model.named_parameters())
    assert optimizer.trust_ratios() == {}
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert list(optimizer.trust_ratios()) == ["weight", "bias"]


def test_trust_ratios_are_ratios_of_norms() -> None:
    for way in WAYS:
        weight = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        optimizer = LARS([weight], variant="lamb_paper", momentum=0.0, **way)
        weight.grad = torch.tensor([0.0, 0.5], dtype=torch.float64)
        optimizer.step()
        assert optimizer.trust_ratios() == {"param_groups[0]['params'][0]": 10.0}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_lamb_with_adapt_false_is_adamw(way: dict[str, bool]) -> None:
    params, twin = parameters(), parameters()
    optimizer = LAMB([{"params": params, "adapt": False}], weight_decay=0.1, eps=1e-8, **way)
    adamw = torch.optim.AdamW(twin, 0.01, weight_decay=0.1, eps=1e-8)
    found = train(optimizer, params, 20, lambda step: 0.01)
    assert largest_difference(found, train(adamw, twin, 20)) < 1e-12
    assert optimizer.trust_ratios() == {}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_always_adapt_false_leaves_out_groups_without_decay(way: dict[str, bool]) -> None:
    def ratios(weight_decay: float, always_adapt: bool) -> dict[str, float]:
        params, ratio = parameters(), TrustRatio(always_adapt=always_adapt)
        optimizer = LAMB(params, weight_decay=weight_decay, trust_ratio=ratio, **way)
        train(optimizer, params, 1)
        return optimizer.trust_ratios()

    assert ratios(0.0, always_adapt=False) == {}
    assert len(ratios(0.0, always_adapt=True)) == len(ratios(0.1, always_adapt=False)) == 5


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("size", [1e-30, 3e-23, 1e30])  # of the second, some digits are left
def test_norms_of_huge_and_tiny_gradients(size: float, way: dict[str, bool]) -> None:
    """Squares of these are infinite or zero in single precision."""
    params, oracle = parameters(torch.float32), parameters(torch.float32)
    optimizer, twin = LARS(params, 1.0, **way), LARS(oracle, 1.0, fused=False)
    for parameter, same, gradient in zip(params, oracle, gradients(0), strict=True):
        parameter.grad, same.grad = gradient.float() * size, gradient.float()
    params, oracle = params[:3], oracle[:3]  # of the others a norm is zero
    optimizer.step()
    twin.step()
    assert largest_difference(params, oracle) < 1e-6


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_trust_ratio_beyond_float_range_makes_a_finite_step(way: dict[str, bool]) -> None:
    """Of a layer whose gradient is nearly zero, or was once and its momentum fades out."""
    tiny = nn.Parameter(torch.ones(4))
    tiny.grad = torch.full((4,), 1e-42)
    LARS([tiny], lr=1.0, **way).step()
    assert torch.equal(tiny, tiny.clamp(0.99, 1.0))
    for make in (
        lambda params: LARS(params, lr=1e-3, variant="lamb_paper", **way),
        lambda params: LAMB(params, lr=1e-3, weight_decay=0.0, **way),
    ):
        faded = nn.Parameter(torch.full((4,), 1e3))
        optimizer = make([faded])
        for step in range(1500):
            faded.grad = torch.full((4,), 0.0 if step else 0.01)
            optimizer.step()
        assert faded.isfinite().all()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_takes_a_tensor_lr_of_one_element(
    way: dict[str, bool], shape: tuple[int, ...], nesterov: bool
) -> None:
    """Also from a rate of 0 on, after which the corrected momentum is 0 and stays so."""
    params, twin = parameters(), parameters()
    options = {"momentum_correction": True, "nesterov": nesterov, **way}
    optimizer = LARS(params, torch.full(shape, 0.1), **options)
    expected = LARS(twin, 0.1, **options)
    for step, rate in enumerate((0.1, 0.2, 0.0, 0.3, 0.1)):
        optimizer.param_groups[0]["lr"].fill_(rate)
        expected.param_groups[0]["lr"] = rate
        for own, made in ((params, optimizer), (twin, expected)):
            set_gradients(own, step)
            made.step()
    assert largest_difference(params, twin) < 1e-7
