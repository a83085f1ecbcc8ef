"""`text` in a pipeline of stages that FSDP2 shards, also beside tensor parallelism and experts."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from allstep.recipes.text import Text
from tests.helpers.divided import divisible_text, keep_one_checkpoint, largest_difference, train_on


def small(folder: Path, **changes: Any) -> Text:
    """Five micro-batches a global batch for two copies, and one in an epoch's last."""
    usual = {"depth": 2, "optimizer": "lamb", "pipeline": 2, "shard": True}
    usual |= {"train_share": 0.24, "checkpoint_every_steps": 5, "keep_checkpoints": 9}
    return divisible_text(folder, **usual | changes)


@pytest.mark.process
@pytest.mark.slow
def test_sharded_stages_train_the_model_of_one_worker(folder: Path, tmp_path: Path) -> None:
    """With dropout, clipping and uneven micro-batches; resumed on other meshes."""
    recipe = small(folder)
    one = train_on(1, recipe, tmp_path / "one")
    assert one[1].num_steps >= 6
    four = train_on(4, recipe, tmp_path / "four")
    assert largest_difference(one, four) < 1e-10
    unclipped = train_on(1, replace(recipe, clip_norm=None), tmp_path / "unclipped")
    assert largest_difference(one, unclipped) > 1e-6
    keep_one_checkpoint(tmp_path / "four", 5)
    flat = replace(recipe, shard=False)
    for size, other in ((1, recipe), (2, recipe), (4, recipe), (4, flat)):
        run_dir = tmp_path / f"resumed-{size}-{other.shard}"
        shutil.copytree(tmp_path / "four", run_dir)
        resumed = train_on(size, other, run_dir, None, True)
        assert largest_difference(one, resumed) < 1e-10
        if size == 4 and other.shard:
            assert all(torch.equal(resumed[0][n], four[0][n]) for n in resumed[0])


@pytest.mark.process
@pytest.mark.slow
def test_sharded_stages_beside_tensor_parallelism_and_experts(folder: Path, tmp_path: Path) -> None:
    """data x pipeline x tensor of 2 x 2 x 2, with experts that are dropped."""
    recipe = small(folder, optimizer="adamw", experts=4, capacity_factor=1.0)
    one = train_on(1, recipe, tmp_path / "one")
    assert one[1].metrics["dropped"] > 0.01
    eight = train_on(8, replace(recipe, tensor_parallel=2), tmp_path / "eight")
    assert largest_difference(one, eight) < 1e-10


@pytest.mark.process
@pytest.mark.slow
def test_float16_of_sharded_stages(folder: Path, tmp_path: Path) -> None:
    """All micro-batches are in one context of autocast; float32 is the control."""
    recipe = small(folder, precision="float16", optimizer="sgd", lr=0.5)
    one = train_on(1, recipe, tmp_path / "one")
    assert largest_difference(one, train_on(4, recipe, tmp_path / "four")) < 2e-3
    float32 = train_on(1, replace(recipe, precision="float32"), tmp_path / "float32")
    assert largest_difference(one, float32) > 0.02


@pytest.mark.process
@pytest.mark.long
def test_copies_of_sharded_stages(folder: Path, tmp_path: Path) -> None:
    """copies x shards x pipeline of 2 x 2 x 2; resumed on one worker."""
    recipe = small(folder, micro_batch=3)
    one = train_on(1, recipe, tmp_path / "one")
    copies = replace(recipe, replicate=2)
    assert largest_difference(one, train_on(8, copies, tmp_path / "run")) < 1e-10
    keep_one_checkpoint(tmp_path / "run", 5)
    assert largest_difference(one, train_on(1, copies, tmp_path / "run", None, True)) < 1e-10
