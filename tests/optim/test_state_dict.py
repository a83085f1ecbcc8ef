"""State dicts of every optimizer: resumed, converted between precisions, refused."""

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from allstep.errors import UsageError
from allstep.optim import (
    LAMB,
    LARS,
    LayerWise,
    RMSpropWarmup,
    SGDRule,
    TrustRatio,
)
from tests.helpers.compare import equal, largest_difference
from tests.optim.table import Make, for_all, parameters, train


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
def test_load_half_precision_keeps_float32_state(make: Make) -> None:
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    train(optimizer, params, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in optimizer.state.values():
        assert {value.dtype for value in state.values()} == {torch.float32}


def test_load_takes_the_memory_layout_of_the_parameter() -> None:
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
def test_load_float32_state_into_half_precision_parameters(make: Make, dtype: torch.dtype) -> None:
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


def test_load_half_precision_adamw_state_adds_a_master_copy() -> None:
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
def test_load_copies_the_state(make: Make) -> None:
    params, twin = parameters(), parameters()
    optimizer, loaded = make(params), make(twin)
    train(optimizer, params, 1)
    loaded.load_state_dict(optimizer.state_dict())
    train(loaded, twin, 1)
    assert all(optimizer.state[parameter]["step"] == 1 for parameter in params)


@for_all
def test_deepcopy_and_pickle(make: Make) -> None:
    params = parameters()
    optimizer = make(params, weight_decay=0.1)
    train(optimizer, params, 2)
    model, twin = copy.deepcopy((params, optimizer))
    expected = train(optimizer, params, 2, first=2)
    assert equal(train(twin, model, 2, first=2), expected)
    assert pickle.loads(pickle.dumps(twin)).nonfinite == "raise"  # type: ignore[attr-defined]


def test_load_adamw_state_into_lamb() -> None:
    """So that a run can change from AdamW to LAMB in the middle."""
    params, twin = parameters(torch.float32), parameters(torch.float32)
    adamw = torch.optim.AdamW(params)
    train(adamw, params, 3)
    lamb = LAMB([{"params": twin, "adapt": False, "trust_ratio": TrustRatio(clip=3.0)}])
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
def test_load_refuses_the_state_of_another_kind(saved: Any, loading: Any, message: str) -> None:
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
            lambda params: LayerWise(params, SGDRule(momentum=0.9), ratio_on="gradient"),
            lambda params: LayerWise(params, SGDRule(momentum=0.9)),
            r"`ratio_on` \(='gradient'\) of a group must be the",
        ),
        (
            lambda params: LAMB(params, trust_ratio=TrustRatio(norm="l1")),
            LAMB,
            r"`trust_norm` \(='l1'\) of a group must be the optimizer's own \(='l2'\)",
        ),
        (
            lambda params: torch.optim.AdamW(params, capturable=True),
            LAMB,
            r"doesn't fit .* `nonfinite` \(='raise'\) looks at numbers on the GPU",
        ),
    ],
)
def test_load_refuses_other_fixed_options(saved: Any, loading: Any, message: str) -> None:
    params = parameters()
    optimizer = loading(params)
    train(optimizer, params, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UsageError, match=message):
        optimizer.load_state_dict(saved(parameters()).state_dict())
    assert str(optimizer.state_dict()) == str(before)


@for_all
def test_load_refuses_numbers_out_of_range(make: Make) -> None:
    state = make(parameters()).state_dict()
    state["param_groups"][0]["weight_decay"] = -5.0
    with pytest.raises(UsageError, match=r"`state_dict` doesn't .* `weight_decay` \(=-5.0\) must"):
        make(parameters()).load_state_dict(state)


@for_all
def test_load_runs_pre_and_post_hooks(make: Make) -> None:
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
def test_load_refuses_the_state_of_other_shapes(make: Make) -> None:
    """A fused kernel would read and write beyond it."""
    small, large = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 4096))
    saved = make([small])
    small.grad = torch.ones_like(small)
    saved.step()
    with pytest.raises(UsageError, match=r"`\w+` \(=\[4, 8\]\) of w, whose shape is \[4, 4096\]"):
        make([("w", large)]).load_state_dict(saved.state_dict())


@for_all
def test_load_refuses_another_order_of_names(make: Make) -> None:
    """Other names, as of a model that is wrapped, are the parameters' own affair."""
    params = parameters()
    optimizer = make([(str(i), p) for i, p in enumerate(params)])
    train(optimizer, params, 1)
    backwards = [(str(i), p) for i, p in enumerate(parameters())][::-1]
    with pytest.raises(UsageError, match=r"`state_dict` has `0` where this optimizer has `\d`"):
        make(backwards).load_state_dict(optimizer.state_dict())
    names = [f"module.{i}" for i in range(len(params))]
    wrapped = make(list(zip(names, parameters(), strict=True)))
    wrapped.load_state_dict(optimizer.state_dict())
    assert wrapped.param_groups[0]["param_names"] == names


@for_all
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_precision_by_now(make: Make, dtype: torch.dtype) -> None:
    """Its state follows, as that of one that is loaded does."""
    params = parameters(torch.float32)
    optimizer = make(params)
    train(optimizer, params, 2)
    twin = [nn.Parameter(p.detach().to(dtype)) for p in params]
    expected = make(twin)
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in params:
        p.grad, p.data = None, p.data.to(dtype)
    assert equal(train(optimizer, params, 3), train(expected, twin, 3))


@for_all
def test_load_leaves_parameters_without_state(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    other = make(parameters())
    other.load_state_dict(optimizer.state_dict())
    assert list(optimizer.state_dict()["state"]) == list(other.state_dict()["state"]) == [0]


@for_all
def test_load_puts_step_counters_on_the_parameters_device(make: Make) -> None:
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


@for_all
@pytest.mark.parametrize("kind", [int, float, np.int64])
def test_load_takes_a_numeric_step(make: Make, kind: Any) -> None:
    """As torch's own optimizers do; theirs were numbers once."""
    params = parameters()
    optimizer = make(params)
    train(optimizer, params, 3)
    state = copy.deepcopy(optimizer.state_dict())
    for each in state["state"].values():
        each["step"] = kind(each["step"])
    twin = [nn.Parameter(p.detach().clone()) for p in params]
    loaded = make(twin)
    loaded.load_state_dict(state)
    assert equal(train(loaded, twin, 2, first=3), train(optimizer, params, 2, first=3))


@for_all
@pytest.mark.parametrize("step", ["3", -1, float("nan"), None])
def test_load_refuses_a_step_that_is_none(make: Make, step: Any) -> None:
    params = parameters()
    optimizer = make(params)
    train(optimizer, params, 1)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["step"] = step
    with pytest.raises(UsageError, match=r"`step` \(=.*\) of parameter 1, which must be a number"):
        optimizer.load_state_dict(state)


def test_load_keeps_momentum() -> None:
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
