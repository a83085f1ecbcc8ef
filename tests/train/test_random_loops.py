"""Loops of a user's own, drawn by a seed: the same on any number of workers, and in any lives."""

import warnings
from collections.abc import Iterator
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


def check(first: int, num_seeds: int, folder: Path) -> None:
    for seed in range(first, first + num_seeds):
        assert differences(seed, folder / str(seed)) == [], f"seed {seed}: {loop_of(seed)}"


@pytest.mark.parametrize("seed", range(8))
def test_random_loop(seed: int, in_float64: None, tmp_path: Path) -> None:
    check(seed, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 180, 20))
def test_some_random_loops(first: int, in_float64: None, tmp_path: Path) -> None:
    check(first, 20, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_random_loops(first: int, in_float64: None, tmp_path: Path) -> None:
    check(first, 100, tmp_path)


def check_experts(first: int, num_seeds: int, folder: Path) -> None:
    """Of which each worker has others."""
    for seed in range(first, first + num_seeds):
        loop = random_experts.loop_of(seed)
        assert random_experts.differences(seed, folder / str(seed)) == [], f"seed {seed}: {loop}"


@pytest.mark.parametrize("seed", range(4))
def test_random_loop_with_experts(seed: int, in_float64: None, tmp_path: Path) -> None:
    check_experts(seed, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 130, 10))
def test_some_random_loops_with_experts(first: int, in_float64: None, tmp_path: Path) -> None:
    check_experts(first, 10, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_many_random_loops_with_experts(first: int, in_float64: None, tmp_path: Path) -> None:
    check_experts(first, 50, tmp_path)


def check_interrupted(first: int, num_seeds: int, folder: Path) -> None:
    """What a policy holds back of gradients goes on with the training."""
    for seed in range(first, first + num_seeds):
        loop, _ = draw_by_num_workers(seed)
        assert changes_by_interruption(seed, folder / str(seed)) == [], f"seed {seed}: {loop}"


@pytest.mark.parametrize("seed", range(8))
def test_interrupted_loop(seed: int, in_float64: None, tmp_path: Path) -> None:
    check_interrupted(seed, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 130, 10))
def test_some_interrupted_loops(first: int, in_float64: None, tmp_path: Path) -> None:
    check_interrupted(first, 10, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_interrupted_loops(first: int, in_float64: None, tmp_path: Path) -> None:
    check_interrupted(first, 100, tmp_path)


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
