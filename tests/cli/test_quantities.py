"""Numbers as people write them, and what is said of those that can't be read."""

import pytest

from allstep.cli.quantities import parse_counts
from allstep.errors import UsageError


@pytest.mark.parametrize("text", ["1-8", "1:8", "1 2 4", "two", "1,,2", ""])
def test_counts_stand_between_commas(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_counts("workers", text)
    assert str(caught.value) == (
        f"`workers` (={text}) must be numbers between commas, such as 1,2,4,8."
    )


def test_a_count_is_at_least_one() -> None:
    with pytest.raises(UsageError, match=r"`workers` \(=0\) must be at least 1"):
        parse_counts("workers", "1,0")


@pytest.mark.parametrize("text", ["2.5", "1,1.5", "1.0001k"])
def test_a_count_is_whole(text: str) -> None:
    with pytest.raises(UsageError, match=r"`workers` \(=.*\) must be a whole number"):
        parse_counts("workers", text)


def test_counts_are_sorted_and_may_have_units() -> None:
    assert parse_counts("workers", "1k, 2,2,1") == [1, 2, 1000]
    assert parse_counts("params", "2.3M,1.001k") == [1001, 2_300_000]
