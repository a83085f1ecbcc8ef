"""Each recipe trains the same model on any number of workers, and goes on with it on another."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import allstep
from allstep import Communicator
from allstep.recipes import REGISTRY
from tests.helpers.compare import differing_names, state_difference
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks
from tests.helpers.small_recipes import SMALL_RECIPES

QUICK = ("digits", "text causal", "gru")


def train(
    comm: Communicator, recipe: Any, run_dir: Path, *, resume: bool = False
) -> dict[str, Tensor]:
    task = recipe.task(comm)
    allstep.fit(task, recipe, comm, run_dir, resume=resume)
    return task.model.state_dict()


def test_every_recipe_is_tested() -> None:
    tested = {name.split()[0] for name in SMALL_RECIPES}
    assert tested | {"cots"} == set(REGISTRY)  # test_cots.py


@pytest.mark.usefixtures("thread_generators")
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SMALL_RECIPES],
)
def test_recipe(name: str, tmp_path: Path) -> None:
    """As it is, with dropout and what else is drawn; an uneven batch, and two stages of BERT."""
    recipe = replace(SMALL_RECIPES[name](tmp_path), compression="exact")
    saved = replace(recipe, checkpoint_every_steps=1, keep_checkpoints=100)
    run = tmp_path / "run"
    (lone,) = run_ranks(1, partial(train, recipe=saved, run_dir=run))
    for n in (2, 3):
        run_dir = tmp_path / f"run-{n}"
        for state in run_ranks(n, partial(train, recipe=recipe, run_dir=run_dir)):
            assert not differing_names(state, lone), n

    _, *later = sorted((run / "checkpoints").glob("step-*"))
    assert later
    for checkpoint in later:
        shutil.rmtree(checkpoint)
    for n in (1, 2):
        resumed = tmp_path / f"resumed-{n}"
        shutil.copytree(run, resumed)
        for state in run_ranks(n, partial(train, recipe=recipe, run_dir=resumed, resume=True)):
            assert not differing_names(state, lone), n

    other = replace(recipe, seed=recipe.seed + 1)
    (state,) = run_ranks(1, partial(train, recipe=other, run_dir=tmp_path / "other"))
    assert state_difference(state, lone) > 1e-3
