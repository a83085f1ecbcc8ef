"""`text` with experts in a pipeline, data x pipeline x tensor: the run of one worker."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allstep import Communicator, UsageError
from allstep.recipes.text import Text
from tests.helpers.compare import differing_names
from tests.helpers.divided import (
    divisible_text,
    keep_one_checkpoint,
    largest_difference,
    train_on,
)
from tests.recipes.test_text_experts_of_shards import average_experts


def small(folder: Path, **changes: Any) -> Text:
    """Five micro-batches a global batch for two copies, and one in an epoch's last."""
    usual = {"depth": 2, "experts": 4, "capacity_factor": 1.0, "pipeline": 2, "held_out": 0.02}
    return divisible_text(folder, **usual | {"train_share": 0.24} | changes)


@pytest.mark.process
@pytest.mark.slow
def test_experts_in_a_pipeline_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    """data x pipeline x tensor of 2x2x1 and 2x2x2; with dropout, clipping, drops and positions."""
    recipe = small(folder, epochs=2, objective="masked")
    assert len(recipe.task(Communicator.single_process()).train_set) % 30 <= 6
    one = train_on(1, recipe, tmp_path / "one")
    assert one[1].num_steps >= 14
    assert one[1].metrics["dropped"] > 0.01
    four = train_on(4, recipe, tmp_path / "4")
    assert largest_difference(one, four) < 1e-10
    assert differing_names(one[0], four[0])
    divided = replace(recipe, tensor_parallel=2)
    assert largest_difference(one, train_on(8, divided, tmp_path / "8")) < 1e-10
    of_mean = train_on(4, recipe, tmp_path / "mean", average_experts)
    assert largest_difference(one, of_mean) > 1e-6


@pytest.mark.process
@pytest.mark.long
def test_exact_sums_of_experts_in_a_pipeline(folder: Path, tmp_path: Path) -> None:
    """The same bits on 2x2 as on one worker; they go on from 2x2x2 in the middle of an epoch."""
    saving = {"checkpoint_every_steps": 5, "keep_checkpoints": 9}
    recipe = small(folder, compression="exact", **saving)
    one = train_on(1, recipe, tmp_path / "one")
    assert not differing_names(one[0], train_on(4, recipe, tmp_path / "4")[0])
    divided = train_on(8, replace(recipe, tensor_parallel=2), tmp_path / "8")
    assert largest_difference(one, divided) < 1e-10
    keep_one_checkpoint(tmp_path / "8", 5)
    for size in (1, 4):
        shutil.copytree(tmp_path / "8", tmp_path / f"on-{size}")
        resumed = train_on(size, recipe, tmp_path / f"on-{size}", None, True)
        assert len(list((tmp_path / f"on-{size}" / "checkpoints").iterdir())) > 1
        assert largest_difference(one, resumed) < 1e-10


@pytest.mark.process
@pytest.mark.slow
def test_float16_of_experts_in_a_pipeline(folder: Path, tmp_path: Path) -> None:
    """All workers skip the steps of one worker; float32 is the control."""
    recipe = small(folder, precision="float16", optimizer="sgd", lr=0.5, train_share=0.2)
    one = train_on(1, recipe, tmp_path / "one")
    found = train_on(4, recipe, tmp_path / "4")
    assert largest_difference(one, found) < 2e-3
    assert found[1].num_skipped == one[1].num_skipped
    float32 = train_on(1, replace(recipe, precision="float32"), tmp_path / "float32")
    assert largest_difference(one, float32) > 0.02


def test_experts_that_do_not_divide_over_the_copies(folder: Path) -> None:
    words = r"`experts` \(=3\) must be a multiple of the 2 copies of the model"
    with pytest.raises(UsageError, match=words):
        small(folder, experts=3, expert_copies=1).check_workers(4)
