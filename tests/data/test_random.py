"""Random states: stable seeds, permutations, and nothing disturbed."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.data.random import (
    derive_permutation,
    derive_seed,
    preserved_random_state,
    seed_all,
)
from tests.data.sets import draw


def test_seeds_are_the_same_in_another_process() -> None:
    program = "from allstep.data.random import derive_seed; print(derive_seed(1, -2, 2**63))"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout
    assert int(printed) == derive_seed(1, -2, 2**63)


def test_seeds_never_change() -> None:
    """They are part of what a run means: other values would be another model."""
    assert derive_seed(0) == 893442142816765029
    assert derive_seed(1, 2, 3) == 6520558355739401531
    assert derive_permutation(8, 0, 1).tolist() == [4, 7, 6, 3, 1, 0, 5, 2]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4), st.integers(0, 3))
def test_seeds_depend_on_every_part(parts: list[int], place: int) -> None:
    changed = list(parts)
    changed[place % len(parts)] ^= 1
    assert len({derive_seed(*parts), derive_seed(*changed), derive_seed(*parts, 0)}) == 3


def test_seeds_are_distinct_and_of_63_bits() -> None:
    seeds = {derive_seed(*parts) for parts in np.ndindex(10, 10, 10)}
    seeds |= {derive_seed(*parts) for parts in np.ndindex(10, 10)}
    assert len(seeds) == 1100
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert derive_seed(np.int64(-3)) == derive_seed(-3)


@pytest.mark.parametrize("num_samples", [1, 2, 7, 8, 1000])
def test_permutation_holds_each_once(num_samples: int) -> None:
    order = derive_permutation(num_samples, 5)
    assert sorted(order.tolist()) == list(range(num_samples))
    assert order.dtype == np.int64


def test_permutations_are_uniform() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(6000):
        order = tuple(derive_permutation(3, seed).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    # 5 standard deviations of a count with expectation 1,000
    assert all(abs(count - 1000) < 5 * (1000 * 5 / 6) ** 0.5 for count in counts.values())


def test_seed_all_sets_all_three() -> None:
    with preserved_random_state():
        seed_all(2**62 + 1)
        first = draw()
        second = draw()
        seed_all(2**62 + 1)
        assert torch.equal(draw(), first)
        assert not (second == first).any()
        seed_all(2**62 + 2)
        assert not (draw() == first).any()


def test_random_state_is_preserved() -> None:
    with preserved_random_state():
        seed_all(1)
        expected = [draw(), draw()]
        seed_all(1)
        found = [draw()]
        with pytest.raises(KeyError), preserved_random_state():
            seed_all(9)
            draw()
            raise KeyError
        found.append(draw())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_preserved_random_state_keeps_pythons_spare_gauss() -> None:
    with preserved_random_state():
        random.seed(1)
        expected = [random.gauss(), random.gauss()]
        random.seed(1)
        found = [random.gauss()]
        with preserved_random_state():
            random.seed(2)
        assert [*found, random.gauss()] == expected
