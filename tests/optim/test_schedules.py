import itertools
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from allstep.errors import UsageError
from allstep.optim import (
    LARS,
    Adam,
    LayerWise,
    SGDRule,
    constant,
    cosine,
    gradual_warmup,
    poly,
    sgd_share,
    slow_start,
    step_decay,
)
from allstep.optim.rules import Rule
from tests.helpers.compare import equal
from tests.optim.table import Make, for_all, one, parameters, set_gradients


def test_warmup_grows_linearly_to_the_full_rate() -> None:
    for schedule in (
        gradual_warmup(constant(), 5),
        cosine(50, 5),
        poly(50, 5),
        gradual_warmup(step_decay([20], 0.1), 5),
    ):
        assert [schedule(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert schedule(5) == 1.0


def test_constant_without_warmup_is_one() -> None:
    assert {constant()(step) for step in range(100)} == {1.0}


def test_cosine_is_half_a_wave() -> None:
    schedule = cosine(110, 10, final=0.2)
    for step in range(10, 110):
        expected = 0.2 + 0.8 * (1 + math.cos(math.pi * (step - 10) / 100)) / 2
        assert schedule(step) == pytest.approx(expected, abs=1e-15)
    assert schedule(60) == pytest.approx(0.6)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_poly_is_a_power_of_what_is_left(power: float) -> None:
    schedule = poly(110, 10, power=power, final=0.1)
    for step in range(10, 110):
        assert schedule(step) == pytest.approx(0.1 + 0.9 * ((110 - step) / 100) ** power)


def test_decays_raise_beyond_their_end() -> None:
    assert cosine(10, final=0.3)(10) == pytest.approx(0.3)
    assert poly(10)(10) == 0.0
    for schedule in (cosine(10), poly(10), slow_start(10)):
        with pytest.raises(
            UsageError, match=r"`step` \(=11\) is beyond .* \(`total_steps` is 10\)"
        ):
            schedule(11)


def test_schedules_refuse_negative_steps() -> None:
    for schedule in (constant(), cosine(10), poly(10), step_decay([5]), slow_start(10)):
        with pytest.raises(UsageError, match=r"`step` \(=-1\) must be 0 or more"):
            schedule(-1)


def test_slow_start_is_in_fractions_of_the_run() -> None:
    whole, short = slow_start(90 * 39), slow_start(90 * 7)
    for epoch in range(90):
        assert whole(39 * epoch) == short(7 * epoch)
        assert whole(39 * epoch + 38) == short(7 * epoch + 6)
    assert [whole(39 * epoch) for epoch in (39, 40, 69, 70, 84, 85, 89)] == [
        *(0.5, 0.075, 0.075, 0.01, 0.01, 0.001, 0.001)
    ]


def test_sgd_share_is_continuous() -> None:
    """The printed slope, 2 / period, is not: it exceeds 1 and jumps back."""
    tiny = 1e-6
    left = (sgd_share(10, 10, 5) - sgd_share(10 - tiny, 10, 5)) / tiny
    right = (sgd_share(10 + tiny, 10, 5) - sgd_share(10, 10, 5)) / tiny
    assert left == pytest.approx(right, rel=1e-5) == pytest.approx(1 / 5, rel=1e-5)
    shares = [sgd_share(epoch / 100, 10, 5) for epoch in range(2000)]
    assert shares == sorted(shares) and max(shares) == 1.0
    assert max(b - a for a, b in itertools.pairwise(shares)) < 0.0021
    printed = [0.5 + 2 * (epoch / 100 - 10) / 5 for epoch in range(1000, 1250)]
    assert max(printed) > 1.4


def test_step_decay_multiplies_at_each_milestone() -> None:
    schedule = step_decay([30, 60, 80])
    assert [schedule(step) for step in (0, 29, 30, 59, 60, 79, 80, 999)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )
    assert step_decay([])(7) == 1.0


@given(
    total_steps=st.integers(2, 500),
    warmup_share=st.floats(0, 0.99),
    final=st.floats(0, 1),
    progress=st.floats(0, 1),
)
def test_multipliers_are_bounded_and_fall_after_the_warmup(
    total_steps: int, warmup_share: float, final: float, progress: float
) -> None:
    warmup_steps = int(warmup_share * total_steps)
    step = int(progress * (total_steps - 1))
    for schedule in (cosine(total_steps, warmup_steps, final), poly(total_steps, warmup_steps)):
        now, later = schedule(step), schedule(step + 1)
        assert 0 <= now <= 1 + 1e-12
        if step >= warmup_steps:
            assert later <= now + 1e-12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gradual_warmup(constant(), -1), r"`warmup_steps` \(=-1\) must be 0 or more"),
        (lambda: cosine(5, 5), r"`total_steps` \(=5\) must exceed `warmup_steps` \(=5\)"),
        (lambda: cosine(5, -2), r"`warmup_steps` \(=-2\) must be 0 or more"),
        (lambda: cosine(math.nan), r"`total_steps` \(=nan\) must be above 0"),  # type: ignore[arg-type]
        (lambda: gradual_warmup(constant(), math.nan), r"`warmup_steps` \(=nan\)"),  # type: ignore[arg-type]
        (lambda: cosine(5)(math.nan), r"`step` \(=nan\) must be 0 or more"),  # type: ignore[arg-type]
        (lambda: slow_start(math.nan), r"`total_steps` \(=nan\) must be above 0"),  # type: ignore[arg-type]
        (lambda: cosine(5, final=1.5), r"`final` \(=1.5\) must be 0 to 1"),
        (lambda: poly(0), r"`total_steps` \(=0\) must be above 0"),
        (lambda: poly(5, power=0.0), r"`power` \(=0.0\) must be above 0"),
        (lambda: poly(5, power=math.nan), r"`power` \(=nan\) must be above 0"),
        (lambda: step_decay([3], factor=0.0), r"`factor` \(=0.0\) must be above 0"),
        (lambda: step_decay([3, 3]), r"`milestones` \(=\[3, 3\]\) must increase"),
        (lambda: cosine("10"), r"`total_steps` \(='10'\) must be above 0"),  # type: ignore[arg-type]
        (lambda: gradual_warmup(constant(), "3"), r"`warmup_steps` \(='3'\) must be 0 or more"),  # type: ignore[arg-type]
        (lambda: poly(10, power="a"), r"`power` \(='a'\) must be above 0"),  # type: ignore[arg-type]
        (lambda: step_decay(3), r"`milestones` \(=3\) must be steps"),  # type: ignore[arg-type]
        (lambda: step_decay(["a"]), r"`milestones` \(='a'\) must be 0 or more"),  # type: ignore[list-item]
        (lambda: slow_start(0), r"`total_steps` \(=0\) must be above 0"),
    ],
)
def test_bad_arguments(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=message):
        make()


def test_schedules_import_no_torch() -> None:
    code = "import sys, allstep.optim; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lambda_lr_follows_the_schedule() -> None:
    params = parameters()
    optimizer = LARS([{"params": params[:1]}, {"params": params[1:], "lr": 1.0}], lr=0.5)
    scheduler = LambdaLR(optimizer, gradual_warmup(constant(), 4))
    rates = []
    for step in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        set_gradients(params, step)
        optimizer.step()
        scheduler.step()
    assert rates == [[0.5 * m, m] for m in (0.25, 0.5, 0.75, 1, 1, 1)]
    state = scheduler.state_dict()
    assert state["lr_lambdas"] == [None, None]  # a plain function is not saved
    other = LambdaLR(
        LARS([{"params": parameters()}, {"params": one()}], lr=0.5), gradual_warmup(constant(), 4)
    )
    other.load_state_dict(state)
    assert other.last_epoch == 6


@for_all
def test_one_cycle_moves_the_rate_and_the_momentum(make: Make) -> None:
    """By its default `cycle_momentum`, also of a base that `LayerWise` is given."""
    params = parameters()
    optimizer = make(params)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    (group,) = optimizer.param_groups
    seen = []
    for step in range(5):
        set_gradients(params, step)
        seen.append(group["betas"][0] if "betas" in group else group["momentum"])
        optimizer.step()
        schedule.step()
    assert seen[0] == 0.95 and min(seen) < 0.9


@pytest.mark.parametrize("base", [Adam(), SGDRule(momentum=0.9, nesterov=True)])
def test_a_moved_momentum_is_the_base_updates(base: Rule) -> None:
    """One step by a schedule's momentum is that of a base with it; the control's is another."""

    def second_step(base: Rule, moved: dict[str, Any]) -> list[Tensor]:
        params = parameters()
        optimizer = LayerWise(params, base, 0.1)
        set_gradients(params, 0)
        optimizer.step()
        optimizer.param_groups[0].update(moved)
        set_gradients(params, 1)
        optimizer.step()
        return [p.detach() for p in params]

    name = "betas" if isinstance(base, Adam) else "momentum"
    other = (0.5, 0.99) if isinstance(base, Adam) else 0.5
    moved = second_step(base, {name: other})
    assert not equal(moved, second_step(base, {}))
    params = parameters()
    optimizer = LayerWise(params, base, 0.1)
    set_gradients(params, 0)
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0][name] = other
    resumed = LayerWise(params, replace(base, **{name: other}), 0.1)
    resumed.load_state_dict(state)
    set_gradients(params, 1)
    resumed.step()
    assert equal(moved, [p.detach() for p in params])
