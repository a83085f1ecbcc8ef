"""What a training costs, against a machine that is taken away many times."""

import math

import numpy as np
import pytest

from allstep.errors import UsageError
from allstep.plan import Price


def simulated_s(
    price: Price, work_s: float, num_machines: int, random: np.random.Generator
) -> float:
    """Seconds of one training: what was not kept is computed again, restarts may fail, too."""
    mean_s = 86_400 / (price.interruptions_per_day * num_machines)
    time_s = 0.0
    for _ in range(round(work_s / price.checkpoint_every_s)):
        needed_s = price.checkpoint_every_s
        while (until_s := random.exponential(mean_s)) < needed_s:
            time_s += until_s
            needed_s = price.restart_s + price.checkpoint_every_s
        time_s += needed_s
    return time_s


@pytest.mark.parametrize(
    ("per_day", "restart_s", "every_s", "num_machines"),
    [(1.0, 120.0, 600.0, 8), (20.0, 300.0, 1800.0, 4), (4.0, 0.0, 3600.0, 2)],
)
def test_expected_seconds_with_interruptions(
    per_day: float, restart_s: float, every_s: float, num_machines: int
) -> None:
    """The formula counts a restart as lost with each interruption, also of a restart."""
    price = Price(
        per_hour=1.0,
        interruptions_per_day=per_day,
        restart_s=restart_s,
        checkpoint_every_s=every_s,
    )
    random = np.random.default_rng(0)
    found = [simulated_s(price, 36_000, num_machines, random) for _ in range(4000)]
    error = np.std(found) / math.sqrt(len(found))
    expected = price.seconds(36_000, num_machines)
    assert expected == pytest.approx(np.mean(found), abs=5 * error, rel=0)
    assert expected > 36_000 + 10 * error


def test_without_interruptions_nothing_is_added() -> None:
    price = Price(per_hour=3.0)
    assert price.seconds(7200, 5) == 7200
    assert price.total(7200, 5) == 30


def test_few_interruptions_cost_about_their_restart_and_half_a_part_each() -> None:
    price = Price(per_hour=1.0, interruptions_per_day=0.01)
    num_interruptions = 36_000 / 86_400 * 0.01
    added_s = price.seconds(36_000, 1) - 36_000
    assert added_s == pytest.approx(num_interruptions * (120 + 300), rel=1e-3)


def test_a_training_that_hardly_ever_ends_costs_without_end() -> None:
    price = Price(per_hour=1.0, interruptions_per_day=24.0, checkpoint_every_s=86_400.0)
    assert price.seconds(1e6, 100) == math.inf


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("per_hour", -1.0),
        ("interruptions_per_day", math.nan),
        ("restart_s", -1.0),
        ("checkpoint_every_s", 0.0),
    ],
)
def test_numbers_out_of_range_are_refused(argument: str, value: float) -> None:
    with pytest.raises(UsageError, match=argument):
        Price(**{"per_hour": 1.0, argument: value})
