"""More data, a larger model or more workers, by what a learning curve says."""

import dataclasses

import pytest

from allstep.plan import Growth, Interval

KNOWN = Growth(
    num_samples=60_000,
    error=0.1,
    twice=0.08,
    twice_interval=Interval(0.07, 0.09),
    floor=None,
    floor_interval=Interval(0.0, 0.04),
)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "more data"),
        ({"twice": 0.095}, "more workers"),
        ({"twice": 0.095, "floor": 0.04}, "more workers"),
        ({"floor": 0.04}, "more data"),
        ({"floor": 0.06, "floor_interval": Interval(0.05, 0.07)}, "a larger model"),
        ({"floor": 0.09, "floor_interval": Interval(0.08, 0.1), "twice": 0.095}, "a larger model"),
    ],
)
def test_what_would_help(changes: dict[str, float], what: str) -> None:
    growth = dataclasses.replace(KNOWN, **changes)
    assert growth.what == what
    assert growth.sentence.startswith(f"{what}: ")
    assert f"from 10.00% to {growth.twice:.2%} (7.00% to 9.00%)" in growth.sentence


def test_a_floor_comes_with_its_interval() -> None:
    growth = dataclasses.replace(KNOWN, floor=0.06, floor_interval=Interval(0.05, 0.07))
    assert "6.00% (5.00% to 7.00%) of the error of 10.00% stays" in growth.sentence
