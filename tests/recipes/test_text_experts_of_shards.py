"""`text` with experts whose hidden features are divided, data x tensor: the run of one worker."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from allstep.comm import divided_modules
from allstep.recipes.text import Text
from tests.helpers.compare import differing_names
from tests.helpers.divided import (
    divisible_text,
    keep_one_checkpoint,
    largest_difference,
    train_on,
    trainings_on,
)


def small(folder: Path, **changes: Any) -> Text:
    usual = {"depth": 2, "experts": 4, "capacity_factor": 1.0, "tensor_parallel": 2}
    return divisible_text(folder, **usual | {"optimizer": "lamb", "train_share": 0.11} | changes)


def average_experts(model: nn.Module) -> None:
    """Gradients as the mean over the axis of data, of what one worker along it has."""
    for modules in divided_modules(model).values():
        for p in modules.parameters():
            p.register_hook(lambda gradient, size=modules.comm.size: gradient / size)


@pytest.mark.process
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_divided_experts_are_the_same_model(size: int, folder: Path, tmp_path: Path) -> None:
    """data x tensor of 1x2 and 2x2; with dropout, clipping, drops and uneven micro-batches."""
    recipe = small(folder, train_share=0.07, depth=1)
    one = train_on(1, recipe, tmp_path / "one")
    assert one[1].metrics["dropped"] > 0.01
    assert largest_difference(one, train_on(size, recipe, tmp_path / "run")) < 1e-10
    if size == 4:
        of_mean = train_on(4, recipe, tmp_path / "mean", average_experts)
        assert largest_difference(one, of_mean) > 1e-6


@pytest.mark.process
@pytest.mark.slow
def test_exact_sums_of_divided_experts(folder: Path, tmp_path: Path) -> None:
    """The same bits on any number of copies, also after a checkpoint of 2x2."""
    recipe = small(folder)
    exact = replace(recipe, compression="exact", checkpoint_every_steps=2, keep_checkpoints=9)
    four, plain_four = trainings_on(4, (exact, tmp_path / "4"), (recipe, tmp_path / "plain-4"))
    keep_one_checkpoint(tmp_path / "4", 2)
    shutil.copytree(tmp_path / "4", tmp_path / "1")
    two, plain_two, resumed = trainings_on(
        2,
        (exact, tmp_path / "2"),
        (recipe, tmp_path / "plain-2"),
        (exact, tmp_path / "4", None, True),
    )
    for found in (two, resumed):
        assert not differing_names(found[0], four[0])
    assert differing_names(plain_two[0], plain_four[0])
    one = train_on(1, exact, tmp_path / "1", None, True)
    for found in (two, plain_two, plain_four):
        assert largest_difference(one, found) < 1e-10
