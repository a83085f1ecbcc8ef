import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import UsageError
from allstep.optim import constant, cosine, poly, step_decay


def test_warmup_grows_linearly_and_its_last_step_is_full() -> None:
    for schedule in (
        constant(warmup_steps=5),
        cosine(50, 5),
        poly(50, 5),
        step_decay([20], 0.1, 5),
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


def test_decays_stay_at_their_end() -> None:
    assert cosine(10, final=0.3)(10) == cosine(10, final=0.3)(1000) == pytest.approx(0.3)
    assert poly(10)(10) == poly(10)(1000) == 0.0


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
    step=st.integers(0, 600),
)
def test_multipliers_stay_in_bounds_and_fall_after_the_warmup(
    total_steps: int, warmup_share: float, final: float, step: int
) -> None:
    warmup_steps = int(warmup_share * total_steps)
    for schedule in (cosine(total_steps, warmup_steps, final), poly(total_steps, warmup_steps)):
        now, later = schedule(step), schedule(step + 1)
        assert 0 <= now <= 1 + 1e-12
        if step >= warmup_steps:
            assert later <= now + 1e-12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constant(warmup_steps=-1), r"`warmup_steps` \(=-1\) must be 0 or more"),
        (lambda: cosine(5, 5), r"`total_steps` \(=5\) must exceed `warmup_steps` \(=5\)"),
        (lambda: cosine(5, -2), r"`warmup_steps` \(=-2\) must be 0 or more"),
        (lambda: cosine(5, final=1.5), r"`final` \(=1.5\) must be between 0 and 1"),
        (lambda: poly(0), r"`total_steps` \(=0\) must exceed"),
        (lambda: poly(5, power=0.0), r"`power` \(=0.0\) must be positive"),
        (lambda: poly(5, power=math.nan), r"`power` \(=nan\) must be positive"),
        (lambda: step_decay([3], factor=0.0), r"`factor` \(=0.0\) must be above 0"),
        (lambda: step_decay([3, 3]), r"`milestones` \(=\[3, 3\]\) must increase"),
        (lambda: step_decay([3], warmup_steps=4), "must not begin before the warm-up ends"),
    ],
)
def test_bad_arguments_are_named(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=message):
        make()


def test_schedules_need_no_torch() -> None:
    code = "import sys, allstep.optim; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
