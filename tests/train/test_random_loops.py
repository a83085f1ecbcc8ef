"""Loops of a user's own, drawn by a seed: the same on any number of workers, and in any lives."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers import random_experts
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.random_loops import (
    changes_by_interruption,
    differences,
    draw_by_num_workers,
    loop_of,
)
from tests.helpers.simulation.random_training import RandomTraining
from tests.helpers.simulation.seeds import one_core


@pytest.fixture
def in_float64(thread_generators: None) -> Iterator[None]:  # noqa: F811
    """And without torch's warnings of layers that have no gradient in some epochs."""
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_default_dtype(torch.float32)


KINDS: dict[str, tuple[Callable[[int], object], Callable[[int, Path], list[str]]]] = {
    "any workers": (loop_of, differences),
    "experts": (random_experts.loop_of, random_experts.differences),
    "interrupted": (lambda seed: draw_by_num_workers(seed)[0], changes_by_interruption),
}


def seeds_of(step: int, **ends: range) -> list[tuple[str, int]]:
    """The first of each so many seeds, of each kind."""
    return [
        (kind.replace("_", " "), first) for kind, all_ in ends.items() for first in all_[::step]
    ]


def check(kind: str, first: int, num_seeds: int, folder: Path) -> None:
    loop_of_seed, differences_of_seed = KINDS[kind]
    for seed in range(first, first + num_seeds):
        found = differences_of_seed(seed, folder / str(seed))
        assert found == [], f"seed {seed}: {loop_of_seed(seed)}"


@pytest.mark.parametrize(
    ("kind", "seed"),
    seeds_of(1, any_workers=range(4), experts=range(2), interrupted=range(4)),
)
def test_random_loop(kind: str, seed: int, in_float64: None, tmp_path: Path) -> None:
    check(kind, seed, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first"),
    seeds_of(10, any_workers=range(100, 130), experts=range(100, 110), interrupted=range(100, 110)),
)
def test_some_random_loops(kind: str, first: int, in_float64: None, tmp_path: Path) -> None:
    check(kind, first, 10, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "first"),
    seeds_of(
        50, any_workers=range(1000, 3000), experts=range(1000, 2000), interrupted=range(1000, 3000)
    ),
)
def test_many_random_loops(kind: str, first: int, in_float64: None, tmp_path: Path) -> None:
    check(kind, first, 50, tmp_path)


def check_elastic(first: int, num_seeds: int) -> None:
    """On simulated machines, of which some are lost and others join."""
    for seed in range(first, first + num_seeds):
        training = RandomTraining(seed)
        try:
            with one_core():
                training.run()
        except Exception as error:
            loop = f"{training.loop}, {training.faults}"
            raise AssertionError(f"seed {seed}: {error} {training.wrong}; {loop}") from error


@pytest.mark.parametrize("seed", range(5, 9))
def test_random_elastic_loop(seed: int, in_float64: None) -> None:
    check_elastic(seed, 1)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 150, 10))
def test_some_random_elastic_loops(first: int, in_float64: None) -> None:
    check_elastic(first, 10)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_many_random_elastic_loops(first: int, in_float64: None) -> None:
    check_elastic(first, 50)
