import itertools

import pytest

from allstep.errors import UsageError
from allstep.optim import (
    chain,
    constant,
    cosine,
    gradual_warmup,
    hold,
    in_samples,
    linear_scaling,
    poly,
    sqrt_scaling,
    step_decay,
)


def test_gradual_warmup_gives_the_rates_of_goyal_et_al() -> None:
    """From 0.1 to 3.2 over 5 epochs by equal increments, then 0.1 times less at 30, 60 and 80."""
    epoch = 156
    schedule = gradual_warmup(step_decay([30 * epoch, 60 * epoch, 80 * epoch]), 5 * epoch, 1 / 32)
    rates = [3.2 * schedule(step) for step in range(90 * epoch)]
    warmup = rates[: 5 * epoch]
    increments = [late - early for early, late in itertools.pairwise(warmup)]
    assert increments == pytest.approx([3.1 / (5 * epoch)] * (5 * epoch - 1))
    assert rates[0] == pytest.approx(0.1 + increments[0])
    assert rates[5 * epoch - 1] == rates[5 * epoch] == rates[30 * epoch - 1] == 3.2
    assert rates[30 * epoch] == pytest.approx(0.32)
    assert rates[-1] == pytest.approx(0.0032)


def test_in_samples_does_not_depend_on_the_batch() -> None:
    schedule = cosine(4096, 512)
    for batch in (1, 32, 128):
        by_steps = in_samples(schedule, batch)
        for seen in range(0, 4097, 512):
            assert by_steps(seen // batch) == schedule(seen)
    with pytest.raises(UsageError, match="beyond the schedule's end"):
        in_samples(cosine(4096), 128)(33)
    with pytest.raises(UsageError, match=r"`step` \(=-1\)"):
        in_samples(cosine(4096), 128)(-1)


@pytest.mark.parametrize("batch", [32, 100, 128, 1000])
def test_in_samples_reaches_the_end_with_short_last_batches(batch: int) -> None:
    """An adapter asks once more after the last step: that is the schedule's end."""
    steps = 3 * -(-1000 // batch)
    schedule = in_samples(cosine(3000), batch, samples_per_epoch=1000)
    values = [schedule(step) for step in range(steps + 1)]
    assert values[-1] == 0
    assert values == sorted(values, reverse=True)
    assert values[steps // 3] == cosine(3000)(1000)
    if 1000 % batch:
        with pytest.raises(UsageError, match="beyond the schedule's end"):
            in_samples(cosine(3000), batch)(steps)


def test_in_samples_refuses_bad_counts() -> None:
    with pytest.raises(UsageError, match="`global_batch`"):
        in_samples(constant(), 0)
    with pytest.raises(UsageError, match="`samples_per_epoch`"):
        in_samples(constant(), 8, samples_per_epoch=0)


def test_chain_counts_each_stage_from_step_zero() -> None:
    first, second = poly(10, 2), cosine(20, 5)
    chained = chain([(10, first), (20, second)])
    assert [chained(step) for step in range(10)] == [first(step) for step in range(10)]
    assert [chained(10 + step) for step in range(21)] == [second(step) for step in range(21)]
    with pytest.raises(UsageError, match=r"`step` \(=31\) is beyond"):
        chained(31)


def test_chain_makes_the_mixed_batch_schedule_of_lamb() -> None:
    """The mixed batch of BERT in 76 minutes: 7,037 steps of 64K, 1,562 of 32K."""
    second = poly(1562, 400, power=1.0)
    schedule = chain([(7037, poly(7037, 1000, power=1.0)), (1562, lambda step: 0.7 * second(step))])
    values = [schedule(step) for step in range(7037 + 1562 + 1)]
    assert max(values[:7037]) == values[999] == 1.0
    assert values[7036] < 2e-4 and values[7037] == pytest.approx(0.7 / 400)
    assert max(values[7037:]) == values[7037 + 399] == 0.7
    assert values[-1] == 0.0
    # One schedule over both would meet the new batch at a tenth of the rate, without warm-up.
    assert poly(8599, 1000, power=1.0)(7037) > 0.2


def test_hold_keeps_the_last_value() -> None:
    held = hold(poly(10, final=0.2), 10)
    assert held(5) == poly(10, final=0.2)(5)
    assert held(10) == held(1000) == pytest.approx(0.2)


def test_scaling_rules_against_published_rates() -> None:
    assert linear_scaling(0.1, 256, 32768) == 12.8  # Akiba et al.
    for k in range(7):  # LAMB on BERT, from 512 to 32K
        rate = sqrt_scaling(5 / (2**3 * 1e3), 512, 512 * 2**k)
        assert rate == pytest.approx(5 / (2 ** (3 - k / 2) * 1e3))
    assert linear_scaling(0.3125, 512, 16384) == 10.0  # epochs of LAMB's warm-up


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gradual_warmup(constant(), -1), r"`warmup_steps` \(=-1\) must be 0 or more"),
        (lambda: gradual_warmup(constant(), 3, 2.0), r"`start` \(=2.0\) must be 0 to 1"),
        (lambda: gradual_warmup(3, 2), r"`schedule` \(=3\) must be a function of the step"),
        (lambda: hold(0.5, 2), r"`schedule` \(=0.5\) must be a function"),
        (lambda: in_samples(0.5, 2), r"`schedule` \(=0.5\) must be a function"),
        (lambda: chain([(2, 3)]), r"`schedule` \(=3\) must be a function"),
        (lambda: in_samples(constant(), 0), r"`global_batch` \(=0\) must be at least 1"),
        (lambda: chain([]), r"`stages` \(of \[\] steps\) must be one or more"),
        (lambda: chain([(0, constant())]), r"`stages` \(of \[0\] steps\)"),
        (lambda: linear_scaling(0.0, 1, 1), r"`base_lr` \(=0.0\) must be above 0"),
        (lambda: sqrt_scaling(0.1, 0, 1), r"`base_batch` \(=0\) must be"),
        (lambda: linear_scaling(0.1, 1, -1), r"`global_batch` \(=-1\) must be"),
    ],
)
def test_bad_arguments(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=message):
        make()
