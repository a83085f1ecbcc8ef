"""What every optimizer promises: torch's conventions, clean gradients, master copies, errors."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from allstep.errors import UsageError
from allstep.optim import (
    LAMB,
    LARS,
    Adam,
    LayerWise,
    NonfiniteGradientError,
    RMSprop,
    RMSpropWarmup,
    ScheduledLR,
    Sgd,
    constant,
    strategy,
)
from tests.optim.table import (
    OPTIMIZERS,
    WAYS,
    Make,
    gradients,
    largest_difference,
    parameters,
    set_gradients,
    train,
)

for_all = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@for_all
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_stay_bit_for_bit(make: Make, dtype: torch.dtype) -> None:
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dict_resumes_bit_for_bit(make: Make, dtype: torch.dtype) -> None:
    whole = parameters(dtype)
    expected = train(make(whole, weight_decay=0.1), whole, 8)

    first = parameters(dtype)
    optimizer = make(first, weight_decay=0.1)
    train(optimizer, first, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    resumed = make(second, weight_decay=0.7)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert equal(train(resumed, second, 3, first=5), expected)


@for_all
def test_state_of_half_precision_loads_in_its_own(make: Make) -> None:
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    train(optimizer, params, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in optimizer.state.values():
        assert {value.dtype for value in state.values()} == {torch.float32}


def test_state_loads_in_the_layout_of_its_parameter() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = LAMB([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        state["state"][0][name] = state["state"][0][name].contiguous()
    optimizer.load_state_dict(state)
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()


@for_all
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_of_single_precision_loads_in_half(make: Make, dtype: torch.dtype) -> None:
    """Parameters that were rounded get a master, and go on as if they had always had one."""
    params, half = parameters(torch.float32), parameters(dtype)
    optimizer = make(params)
    train(optimizer, params, 2)
    for parameter, rounded in zip(params, half, strict=True):
        rounded.data.copy_(parameter.data)
    loaded = make(half)
    loaded.load_state_dict(optimizer.state_dict())
    for parameter in half:
        state = loaded.state[parameter]
        assert torch.equal(state["master"], parameter.float())
        assert {value.dtype for value in state.values()} == {torch.float32}
    train(loaded, half, 1, first=2)
    again = make(params)
    again.load_state_dict(loaded.state_dict())
    assert all("master" not in state for state in again.state.values())
    train(again, params, 1, first=3)


def test_state_of_adamw_in_half_precision_gets_a_master() -> None:
    """Steps that bfloat16 can't show add up."""
    weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    saved = torch.optim.AdamW([weight], lr=0.0)
    saved.step()
    optimizer = LAMB([weight], lr=1e-3, weight_decay=0.0)
    optimizer.load_state_dict(saved.state_dict())
    optimizer.param_groups[0]["lr"] = 1e-3
    for _ in range(50):
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(0.999**50, rel=0.005)


@for_all
def test_what_was_loaded_is_no_longer_the_savers(make: Make) -> None:
    params, twin = parameters(), parameters()
    optimizer, loaded = make(params), make(twin)
    train(optimizer, params, 1)
    loaded.load_state_dict(optimizer.state_dict())
    train(loaded, twin, 1)
    assert all(optimizer.state[parameter]["step"] == 1 for parameter in params)


@for_all
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_updated_through_a_master(make: Make, dtype: torch.dtype) -> None:
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
def test_master_follows_a_parameter_that_was_set(make: Make) -> None:
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


def test_a_master_keeps_its_digits_where_its_parameter_was_left_alone() -> None:
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
def test_master_follows_a_write_that_leaves_no_trace(make: Make) -> None:
    """Through `.data`, as `vector_to_parameters` and averages of weights write."""
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    train(optimizer, params, 1)
    total = sum(parameter.numel() for parameter in params)
    nn.utils.vector_to_parameters(torch.full((total,), 5.0, dtype=torch.bfloat16), params)
    for group in optimizer.param_groups:
        group["lr"] = 1e-30
    train_nothing(optimizer, params)
    for parameter in params:  # what momentum is left goes on
        torch.testing.assert_close(
            parameter.detach(), torch.full_like(parameter, 5.0), rtol=0, atol=0.3
        )


def train_nothing(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


@for_all
def test_maximize_is_the_negative_gradient(make: Make) -> None:
    up, down = parameters(), parameters()
    ascent, descent = make(up, weight_decay=0.1, maximize=True), make(down, weight_decay=0.1)
    for step in range(5):
        for parameter, twin, gradient in zip(up, down, gradients(step), strict=True):
            parameter.grad, twin.grad = gradient, -gradient
        ascent.step()
        descent.step()
    assert largest_difference([p.detach() for p in up], [p.detach() for p in down]) < 1e-14


@for_all
def test_rate_as_a_tensor(make: Make) -> None:
    numbers, tensors = parameters(), parameters()
    expected = train(make(numbers, lr=0.02), numbers, 5)
    lr = torch.tensor(0.02, dtype=torch.float64)
    found = train(make(tensors, lr=lr), tensors, 5)
    assert largest_difference(found, expected) < 1e-14


@for_all
def test_closure_is_called_with_gradients_enabled(make: Make) -> None:
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
def test_groups_have_their_own_options(make: Make) -> None:
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
def test_parameters_without_a_gradient_wait(make: Make) -> None:
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
def test_any_layout_of_memory(make: Make) -> None:
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
def test_copies_and_pickles(make: Make) -> None:
    params = parameters()
    optimizer = make(params, weight_decay=0.1)
    train(optimizer, params, 2)
    model, twin = copy.deepcopy((params, optimizer))
    expected = train(optimizer, params, 2, first=2)
    assert equal(train(twin, model, 2, first=2), expected)
    assert pickle.loads(pickle.dumps(twin)).nonfinite == "raise"  # type: ignore[attr-defined]


def test_named_parameters_name_the_ratios() -> None:
    model = nn.Linear(3, 2)
    optimizer = LAMB(model.named_parameters())
    assert optimizer.trust_ratios() == {}
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert list(optimizer.trust_ratios()) == ["weight", "bias"]


def test_ratios_are_those_of_the_norms() -> None:
    for way in WAYS:
        weight = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        optimizer = LARS([weight], variant="lamb_paper", momentum=0.0, **way)
        weight.grad = torch.tensor([0.0, 0.5], dtype=torch.float64)
        optimizer.step()
        assert optimizer.trust_ratios() == {"param_groups[0]['params'][0]": 10.0}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_groups_that_do_not_adapt_have_a_ratio_of_one(way: dict[str, bool]) -> None:
    params, twin = parameters(), parameters()
    optimizer = LAMB([{"params": params, "adapt": False}], weight_decay=0.1, eps=1e-8, **way)
    adamw = torch.optim.AdamW(twin, 0.01, weight_decay=0.1, eps=1e-8)
    found = train(optimizer, params, 20, lambda step: 0.01)
    assert largest_difference(found, train(adamw, twin, 20)) < 1e-12
    assert optimizer.trust_ratios() == {}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_always_adapt_decides_about_groups_without_decay(way: dict[str, bool]) -> None:
    def ratios(weight_decay: float, always_adapt: bool) -> dict[str, float]:
        params = parameters()
        optimizer = LAMB(params, weight_decay=weight_decay, always_adapt=always_adapt, **way)
        train(optimizer, params, 1)
        return optimizer.trust_ratios()

    assert ratios(0.0, always_adapt=False) == {}
    assert len(ratios(0.0, always_adapt=True)) == len(ratios(0.1, always_adapt=False)) == 5


def test_state_is_adams() -> None:
    """So that a run can change from AdamW to LAMB in the middle."""
    params, twin = parameters(torch.float32), parameters(torch.float32)
    adamw = torch.optim.AdamW(params)
    train(adamw, params, 3)
    lamb = LAMB([{"params": twin, "adapt": False, "trust_clip": 3.0}])
    lamb.load_state_dict(adamw.state_dict())
    (group,) = lamb.param_groups
    assert (group["adapt"], group["trust_clip"], group["eps"]) == (False, 3.0, 1e-8)
    train(lamb, twin, 1)
    assert all(float(lamb.state[parameter]["step"]) == 4 for parameter in twin)


@pytest.mark.parametrize(
    ("saved", "loading", "message"),
    [
        (LAMB, LARS, "no momentum_buffer, which LARS keeps"),
        (
            lambda params: torch.optim.SGD(params, momentum=0.9),
            LARS,
            "has momentum_buffer of parameter 0, and no step",
        ),
        (lambda params: torch.optim.SGD(params, momentum=0.9), LAMB, "no step, exp_avg, exp_avg"),
        (
            torch.optim.AdamW,
            lambda params: RMSpropWarmup(params, 0.1, center_steps=1, period_steps=1),
            "no square_avg, delta, which RMSpropWarmup keeps",
        ),
    ],
)
def test_the_state_of_another_kind_is_refused(saved: Any, loading: Any, message: str) -> None:
    params = parameters()
    optimizer = saved(params)
    train(optimizer, params, 1)
    with pytest.raises(UsageError, match=message):
        loading(parameters()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("saved", "loading", "message"),
    [
        (
            lambda params: LARS(params, variant="paper"),
            lambda params: LARS(params, variant="lamb_paper"),
            r"doesn't fit this optimizer: `variant` \(='paper'\) of a group must be the",
        ),
        (
            lambda params: LARS(params, variant="mlperf"),
            LARS,
            r"`variant` \(='mlperf'\) of a group must be the optimizer's own \(='paper'\)",
        ),
        (
            lambda params: LayerWise(params, Sgd(momentum=0.9), ratio_on="gradient"),
            lambda params: LayerWise(params, Sgd(momentum=0.9)),
            r"`ratio_on` \(='gradient'\) of a group must be the",
        ),
        (
            lambda params: LAMB(params, norm="l1"),
            LAMB,
            r"`norm` \(='l1'\) of a group must be the optimizer's own \(='l2'\)",
        ),
        (
            lambda params: torch.optim.AdamW(params, capturable=True),
            LAMB,
            r"doesn't fit .* `nonfinite` \(='raise'\) looks at numbers on the GPU",
        ),
    ],
)
def test_a_state_with_other_options_is_refused(saved: Any, loading: Any, message: str) -> None:
    params = parameters()
    optimizer = loading(params)
    train(optimizer, params, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UsageError, match=message):
        optimizer.load_state_dict(saved(parameters()).state_dict())
    assert str(optimizer.state_dict()) == str(before)


@for_all
def test_a_states_bad_numbers_are_refused(make: Make) -> None:
    state = make(parameters()).state_dict()
    state["param_groups"][0]["weight_decay"] = -5.0
    with pytest.raises(UsageError, match=r"`state_dict` doesn't .* `weight_decay` \(=-5.0\) must"):
        make(parameters()).load_state_dict(state)


@for_all
def test_hooks_see_and_change_what_is_loaded(make: Make) -> None:
    """As those that find parameters by their names; and after loading."""
    params = parameters(torch.bfloat16)
    optimizer = make([(str(i), parameter) for i, parameter in enumerate(params)])
    train(optimizer, params, 3)
    backwards = parameters(torch.bfloat16)[::-1]
    names = [str(i) for i in reversed(range(len(params)))]
    other = make(list(zip(names, backwards, strict=True)))

    def by_name(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        (own,), (saved,) = optimizer.param_groups, state_dict["param_groups"]
        place = {name: index for index, name in enumerate(saved["param_names"])}
        order = [place[name] for name in own["param_names"]]
        states = {i: state_dict["state"][j] for i, j in enumerate(order)}
        return {"state": states, "param_groups": [{**saved, "param_names": names}]}

    loaded = []
    other.register_load_state_dict_pre_hook(by_name)
    other.register_load_state_dict_post_hook(
        lambda optimizer: loaded.extend(optimizer.state[p]["master"].dtype for p in backwards)
    )
    other.load_state_dict(optimizer.state_dict())
    assert loaded == [torch.float32] * len(params)
    for mine, theirs in zip(params, reversed(backwards), strict=True):
        for name, value in optimizer.state[mine].items():
            assert torch.equal(value, other.state[theirs][name]), name
    other.load_state_dict(optimizer.state_dict())  # no hook of ours is left to run twice
    assert len(loaded) == 2 * len(params)


@for_all
def test_parameters_without_a_state_are_loaded_without_one(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    other = make(parameters())
    other.load_state_dict(optimizer.state_dict())
    assert list(optimizer.state_dict()["state"]) == list(other.state_dict()["state"]) == [0]


@for_all
def test_counters_load_to_their_parameters_device(make: Make) -> None:
    """A fused kernel wants them there; checkpoints are read to the CPU."""
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = make([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    elsewhere = nn.Parameter(torch.empty(3, 2, device="meta"))
    loaded = make([elsewhere])
    loaded.load_state_dict(optimizer.state_dict())
    for name, value in loaded.state[elsewhere].items():
        assert value.device.type == "meta", name


def test_a_loaded_momentum_goes_on() -> None:
    """Nothing that was loaded is made anew."""
    params, twin = parameters(), parameters()
    optimizer = LARS(params)
    train(optimizer, params, 3)
    resumed = LARS(twin)
    resumed.load_state_dict(optimizer.state_dict())
    assert (
        largest_difference(
            [resumed.state[p]["momentum_buffer"] for p in twin],
            [optimizer.state[p]["momentum_buffer"] for p in params],
        )
        == 0
    )


@for_all
def test_groups_keep_their_own_options_however_they_are_batched(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As optimizers of their own would; groups differ in rate and decay, and one in dtype."""
    options = [{"lr": 0.1, "weight_decay": 0.01}, {"lr": 0.02}, {"lr": 0.05, "weight_decay": 0.3}]
    parts = [slice(0, 3), slice(3, 4), slice(4, 5)]

    def mixed() -> list[nn.Parameter]:
        params = parameters(torch.float32)
        return [*params[:2], nn.Parameter(params[2].detach().double()), *params[3:]]

    def together() -> list[Tensor]:
        params = mixed()
        groups = [{"params": params[part], **o} for part, o in zip(parts, options, strict=True)]
        return train(make(groups), params, 4)

    expected = []
    for part, of_group in zip(parts, options, strict=True):
        params = mixed()
        expected += train(make(params[part], **of_group), params, 4)[part]
    for max_elements in (strategy.BATCH_ELEMENTS, 40, 1):
        monkeypatch.setattr(strategy, "BATCH_ELEMENTS", max_elements)
        assert equal(together(), expected)


# --- gradients that are not finite ------------------------------------------------------------


def bad_gradient(params: list[nn.Parameter], value: float = float("nan")) -> None:
    set_gradients(params, 9)
    assert params[1].grad is not None
    params[1].grad[2] = value


@for_all
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_gradients_are_named(make: Make, value: float) -> None:
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
def test_bad_gradients_of_large_layers_are_named(make: Make, norm: str) -> None:
    """They are measured block by block; here the second is bad."""
    weight = nn.Parameter(torch.ones(2**20 + 5))
    weight.grad = torch.ones_like(weight)
    weight.grad[-1] = float("nan")
    with pytest.raises(NonfiniteGradientError, match="gradient of param_groups"):
        make([weight], lr=0.1, norm=norm).step()
    assert torch.equal(weight.detach(), torch.ones(2**20 + 5))


@pytest.mark.parametrize("variant", ["paper", "mlperf"])
@pytest.mark.parametrize("fused", [None, False])
def test_nothing_moves_if_ratios_are_on_gradients_and_one_is_bad(
    variant: Literal["paper", "mlperf"], fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "BATCH_ELEMENTS", 4)
    params = parameters()
    optimizer = LARS(params, lr=0.1, variant=variant, fused=fused)
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


def test_bad_gradients_are_named_by_the_given_names() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = LARS(list(model.named_parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    with pytest.raises(NonfiniteGradientError, match=r"0.weight, .*, 2.weight and 3 more"):
        optimizer.step()


@for_all
def test_bad_gradients_are_skipped_and_counted(make: Make) -> None:
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
def test_bad_gradients_propagate_if_wanted(make: Make) -> None:
    params = parameters()
    optimizer = make(params, nonfinite="propagate")
    bad_gradient(params)
    optimizer.step()
    assert bool(params[1].isnan().any()) and bool(params[0].isfinite().all())


@for_all
def test_large_finite_gradients_are_fine(make: Make) -> None:
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


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("size", [1e-30, 3e-23, 1e30])  # of the second, some digits are left
def test_norms_neither_overflow_nor_vanish(size: float, way: dict[str, bool]) -> None:
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
def test_a_ratio_beyond_all_numbers_makes_a_finite_step(way: dict[str, bool]) -> None:
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


# --- bad input --------------------------------------------------------------------------------


def one() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


@for_all
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"`lr` \(=-0.1\) must be a finite number, 0 or more"),
        ({"lr": float("nan")}, r"`lr` \(=nan\) must be a finite number"),
        ({"lr": torch.tensor(-1.0)}, r"`lr` \(=-1.0\) must be a finite number"),
        ({"weight_decay": -1.0}, r"`weight_decay` \(=-1.0\) must be finite and 0 or more"),
        ({"lr": torch.tensor(float("inf"))}, r"`lr` \(=inf\) must be a finite number"),
        ({"lr": "0.1"}, r"`lr` \(='0.1'\) must be a finite number"),
        ({"weight_decay": None}, r"`weight_decay` \(=None\) must be finite and 0 or more"),
        ({"nonfinite": "ignore"}, r"`nonfinite` \(='ignore'\) must be one of raise, skip"),
    ],
)
def test_bad_options_are_named(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(one(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LAMB(one(), betas=(0.9, 1.0)), r"`betas` \(=\(0.9, 1.0\)\) must be two numbers"),
        (lambda: LAMB(one(), betas=0.9), r"`betas` \(=0.9\) must be two numbers"),
        (lambda: LAMB(one(), eps=-1.0), r"`eps` \(=-1.0\) must be finite and 0 or more"),
        (lambda: LAMB(one(), phi=(2.0, 1.0)), r"`phi` \(=\(2.0, 1.0\)\) must be \(low, high\)"),
        (lambda: LAMB(one(), trust_clip=0.0), r"`trust_clip` \(=0.0\) must be positive"),
        (lambda: LAMB(one(), trust_eps=-1.0), r"`trust_eps` \(=-1.0\) must be finite"),
        (lambda: LAMB(one(), norm="l3"), r"`norm` \(='l3'\) must be one of l1, l2, linf"),
        (lambda: LAMB(one(), fused=True, foreach=True), "exclude each other"),
        (lambda: LAMB(one(), capturable=True), r"`nonfinite` \(='raise'\) looks at numbers"),
        (
            lambda: RMSpropWarmup(one(), 0.1, center_steps=1, period_steps=1, rmsprop_lr=-1.0),
            r"`rmsprop_lr` \(=-1.0\) must be finite and 0 or more",
        ),
        (
            lambda: LAMB([{"params": torch.ones(2, dtype=torch.complex64)}]),
            r"params'\]\[0\] \(=torch.complex64\) must be a tensor of real",
        ),
        (lambda: LARS(one(), momentum=1.0), r"`momentum` \(=1.0\) must be at least 0"),
        (lambda: LARS(one(), variant="apex"), r"`variant` \(='apex'\) must be one of paper"),
        (lambda: LARS(one(), trust_coefficient=0.0), r"`trust_coefficient` \(=0.0\)"),
        (lambda: LARS(one(), momentum=0.0, nesterov=True), r"`nesterov` \(=True\) needs a"),
        (
            lambda: LARS(one(), variant="lamb_paper", momentum_correction=True),
            r"`momentum_correction` \(=True\) needs the ratio on the gradient",
        ),
        (
            lambda: LARS([{"params": one(), "momentum_correction": True}], variant="lamb_paper"),
            r"`momentum_correction` \(=True\) needs the ratio on the gradient",
        ),
        (
            lambda: LARS([{"params": one(), "nesterov": True}], variant="lamb_paper"),
            r"`nesterov` \(=True\) needs a",
        ),
        (
            lambda: LAMB([{"params": one(), "capturable": True}]),
            r"`nonfinite` \(='raise'\) looks at numbers",
        ),
        (
            lambda: RMSpropWarmup(
                [{"params": one(), "period_steps": -3}], 0.1, center_steps=1, period_steps=1
            ),
            r"`period_steps` \(=-3\) must be positive",
        ),
        (
            lambda: LayerWise(one(), Adam),
            r"`base` \(=<class .*Adam'>\) must be a base update, such",
        ),  # type: ignore[arg-type]
        (lambda: LayerWise(one(), "adam"), r"`base` \(='adam'\) must be a base update, such as"),  # type: ignore[arg-type]
        (lambda: LayerWise(one(), Adam(), ratio_on="loss"), r"`ratio_on` \(='loss'\) must be"),
        (lambda: LayerWise(one(), Adam(), ratio_on="gradient"), r"must be `Sgd` when the ratio"),
        (lambda: Sgd(momentum=-0.1), r"`momentum` \(=-0.1\)"),
        (lambda: Adam(eps=-0.1), r"`eps` \(=-0.1\)"),
        (lambda: RMSprop(alpha=1.0), r"`alpha` \(=1.0\)"),
        (
            lambda: RMSpropWarmup(one(), 0.1, center_steps=1, period_steps=0),
            r"`period_steps` \(=0\) must be positive",
        ),
        (
            lambda: RMSpropWarmup(one(), 0.1, center_steps=-1, period_steps=1),
            r"`center_steps` \(=-1\) must be 0 or more",
        ),
        (
            lambda: RMSpropWarmup(one(), 0.1, center_steps=None, period_steps=1),  # type: ignore[arg-type]
            r"`center_steps` \(=None\) must be 0 or more",
        ),
        (
            lambda: RMSpropWarmup(one(), 0.1, center_steps=float("inf"), period_steps=1),
            r"`center_steps` \(=inf\) must be 0 or more",
        ),
    ],
)
def test_bad_options_of_one_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@for_all
def test_bad_groups_are_refused(make: Make) -> None:
    with pytest.raises(UsageError, match="`params` is empty; pass"):
        make([])
    with pytest.raises(UsageError, match="`params` of group 1 is empty; leave the group out"):
        make([{"params": one()}, {"params": []}])
    shared = one()
    with pytest.raises(UsageError, match="group 0 holds a parameter twice; list tied parameters"):
        make(shared * 2)
    overlap = r"group 1 overlaps .* also holds param_groups\[0\]\['params'\]\[0\]"
    with pytest.raises(UsageError, match=overlap):
        make([{"params": shared}, {"params": [*one(), *shared]}])
    with pytest.raises(UsageError, match=r"\(=torch.complex64\) must be a tensor of real"):
        make([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(UsageError, match=r"\(=int\) must be a tensor of real"):
        make([1])
    with pytest.raises(UsageError, match=r"\(=torch.float8_e4m3fn\) must be a tensor of real"):
        make([nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))])
    with pytest.raises(UsageError, match=r"`params` \(=None\) must be parameters or groups"):
        make(None)
    with pytest.raises(UsageError, match=r"`lr` \(=-1\)"):
        make(one()).add_param_group({"params": one(), "lr": -1})
    with pytest.raises(TypeError, match="should be an iterable"):
        make(torch.ones(2))
    with pytest.raises(UsageError, match=r"group 0 \(='lr'\) lacks `params`"):
        make([{"lr": 0.1}])
    with pytest.raises(UsageError, match=r"`nonfinite` \(='skip'\) of a group must be the opt"):
        make([{"params": one(), "nonfinite": "skip"}])


@for_all
def test_a_negative_rate_is_refused_when_a_schedule_sets_it(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    ScheduledLR(optimizer, lambda step: -1.0)
    set_gradients(params, 0)
    with pytest.raises(UsageError, match=r"`lr` \(=-0.01\)"):
        optimizer.step()


@for_all
def test_sparse_gradients_are_refused_by_name(make: Make) -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = make(list(embedding.named_parameters()))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"gradient of weight \(=torch.sparse_coo\) must be dense"):
        optimizer.step()


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_rmsprop_warmup_needs_a_rate(lr: Any) -> None:
    params = parameters()
    optimizer = RMSpropWarmup(params, lr, center_steps=5, period_steps=5)
    set_gradients(params, 0)
    with pytest.raises(UsageError, match=r"`lr` \(=0.0\) must be positive during the transition"):
        optimizer.step()


def test_rmsprop_warmup_makes_its_state_without_rate_and_gradient() -> None:
    """As torch's distributed checkpoints have every optimizer do."""
    model = nn.Linear(4, 2)
    optimizer = RMSpropWarmup(model.parameters(), 0.1, center_steps=5, period_steps=2)
    before = copy.deepcopy(model.state_dict())
    saved = get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]["weight"]) == {"step", "square_avg", "delta"}
    assert equal(list(before.values()), list(model.state_dict().values()))


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_rmsprop_warmup_takes_a_rate_of_one_element(foreach: Any, shape: tuple[int, ...]) -> None:
    params, twin = parameters(), parameters()
    options = {"center_steps": 5, "period_steps": 5, "foreach": foreach}
    found = train(RMSpropWarmup(params, torch.full(shape, 0.1), **options), params, 3)
    expected = train(RMSpropWarmup(twin, 0.1, **options), twin, 3)
    assert largest_difference(found, expected) < 1e-7


def test_rmsprop_warmup_needs_no_rate_afterwards() -> None:
    params = parameters()
    optimizer = RMSpropWarmup(params, 0.1, center_steps=1, period_steps=2)
    train(optimizer, params, 4)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in params]
    assert equal(train(optimizer, params, 1), before)


@pytest.mark.parametrize("foreach", [None, False])
def test_a_group_that_joins_is_as_far_in_the_transition(foreach: Any) -> None:
    """At its end a new group makes a step of SGD, not one of RMSprop."""
    params, (late,) = parameters(), one()
    optimizer = RMSpropWarmup(params, 0.1, center_steps=1, period_steps=2, foreach=foreach)
    train(optimizer, params, 4)
    optimizer.add_param_group({"params": [late]})
    before, late.grad = late.detach().clone(), torch.full_like(late, 3.0)
    optimizer.step()
    torch.testing.assert_close(late.detach(), before - 0.1 * 3.0)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_corrected_by_a_rate_of_one_element(
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


def test_scheduled_rates_follow_the_schedule() -> None:
    params = parameters()
    optimizer = LARS([{"params": params[:1]}, {"params": params[1:], "lr": 1.0}], lr=0.5)
    scheduler = ScheduledLR(optimizer, constant(warmup_steps=4))
    rates = []
    for step in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        set_gradients(params, step)
        optimizer.step()
        scheduler.step()
    assert rates == [[0.5 * m, m] for m in (0.25, 0.5, 0.75, 1, 1, 1)]
    state = scheduler.state_dict()
    assert "schedule" not in state
    other = ScheduledLR(LARS(parameters(), lr=0.5), constant(warmup_steps=4))
    other.load_state_dict(state)
    assert other.last_epoch == 6
