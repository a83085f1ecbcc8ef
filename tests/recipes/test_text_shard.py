"""`text` sharded over its workers by FSDP2: the run of one worker."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allstep import Communicator, UsageError
from allstep.recipes.text import Text
from tests.helpers.compare import differing_names
from tests.helpers.divided import divisible_text, keep_one_checkpoint, largest_difference, train_on
from tests.helpers.processes import RemoteError


def small(folder: Path, **changes: Any) -> Text:
    usual = {"depth": 2, "optimizer": "lamb", "shard": True}
    return divisible_text(folder, **usual | changes)


@pytest.mark.process
@pytest.mark.slow
def test_shards_train_the_model_of_one_worker(folder: Path, tmp_path: Path) -> None:
    """With dropout, clipping and uneven micro-batches; resumed from 2 workers on 1, 2 and 3."""
    recipe = small(folder, train_share=0.11, checkpoint_every_steps=3, keep_checkpoints=9)
    one = train_on(1, recipe, tmp_path / "one")
    two = train_on(2, recipe, tmp_path / "two")
    assert largest_difference(one, two) < 1e-10
    unclipped = train_on(1, replace(recipe, clip_norm=None), tmp_path / "unclipped")
    assert largest_difference(one, unclipped) > 1e-6
    keep_one_checkpoint(tmp_path / "two", 3)
    for size in (1, 2, 3):
        run_dir = tmp_path / f"resumed-{size}"
        shutil.copytree(tmp_path / "two", run_dir)
        resumed = train_on(size, recipe, run_dir, None, True)
        assert largest_difference(one, resumed) < 1e-10
        if size == 2:
            assert all(torch.equal(resumed[0][n], two[0][n]) for n in resumed[0])


@pytest.mark.process
@pytest.mark.slow
def test_exact_sums_of_shards_have_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """In float32; with norms on 2 and 3 workers, and without on one that has no shards, too."""
    recipe = small(folder, compression="exact", precision="float32", train_share=0.11)
    two, three = (train_on(size, recipe, tmp_path / f"norms-{size}") for size in (2, 3))
    recipe = replace(recipe, clip_norm=None, optimizer="adamw")
    one, other = (train_on(size, recipe, tmp_path / f"{size}") for size in (1, 2))
    plain = train_on(2, replace(recipe, compression="fp32"), tmp_path / "plain")
    for found, expected in ((three, two), (other, one)):
        assert not differing_names(found[0], expected[0])
        assert found[1].metrics == expected[1].metrics
    assert differing_names(plain[0], one[0])


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ({"tensor_parallel": 2}, 2),
        ({"experts": 3}, 1),  # of which both workers have all
        ({"experts": 2}, 2),  # of which four workers have two copies
        ({"pipeline": 2, "experts": 4}, 2),
        pytest.param({"tensor_parallel": 2, "experts": 4}, 2, marks=pytest.mark.long),
    ],
)
def test_exact_sums_of_shards_beside_other_parts(
    folder: Path, tmp_path: Path, parts: dict[str, Any], size: int
) -> None:
    """Of two workers for each part the bits of one, which shards nothing; resumed half way."""
    saving = {"checkpoint_every_steps": 3, "keep_checkpoints": 9}
    options = {"clip_norm": None, "optimizer": "adamw", "train_share": 0.11, **parts, **saving}
    recipe = small(folder, compression="exact", precision="float32", **options)
    one = train_on(size, recipe, tmp_path / "one")
    two = train_on(2 * size, recipe, tmp_path / "two")
    keep_one_checkpoint(tmp_path / "two", 3)
    resumed = train_on(size, recipe, tmp_path / "two", None, True)
    for found in (two, resumed):
        assert not differing_names(found[0], one[0])
        assert found[1].metrics == one[1].metrics
    plain = train_on(2 * size, replace(recipe, compression="fp32"), tmp_path / "plain")
    assert differing_names(plain[0], one[0])


@pytest.mark.process
@pytest.mark.slow
def test_shards_of_a_model_of_padded_paragraphs(folder: Path, tmp_path: Path) -> None:
    """Whose losses are sums over tokens, weighed by them."""
    recipe = small(folder, train_share=0.11, samples="paragraphs", optimizer="adamw")
    one, three = (train_on(size, recipe, tmp_path / f"{size}") for size in (1, 3))
    assert largest_difference(one, three) < 1e-10


@pytest.mark.process
@pytest.mark.slow
def test_shards_beside_tensor_parallelism(folder: Path, tmp_path: Path) -> None:
    """data x tensor of 2 x 2; resumed on 1 x 2, on 2 x 2, on 2 x 1 and on one worker."""
    recipe = small(folder, train_share=0.11, checkpoint_every_steps=3, keep_checkpoints=9)
    one = train_on(1, recipe, tmp_path / "one")
    both = replace(recipe, tensor_parallel=2)
    four = train_on(4, both, tmp_path / "four")
    assert largest_difference(one, four) < 1e-10
    keep_one_checkpoint(tmp_path / "four", 3)
    for size, resumed_recipe in ((1, both), (2, recipe), (2, both), (4, both)):
        run_dir = tmp_path / f"resumed-{size}-{resumed_recipe.tensor_parallel}"
        shutil.copytree(tmp_path / "four", run_dir)
        resumed = train_on(size, resumed_recipe, run_dir, None, True)
        assert largest_difference(one, resumed) < 1e-10
        if size == 4:
            assert all(torch.equal(resumed[0][n], four[0][n]) for n in resumed[0])


@pytest.mark.process
@pytest.mark.slow
def test_copies_of_shards_beside_tensor_parallelism(folder: Path, tmp_path: Path) -> None:
    """copies x shards x tensor of 2 x 2 x 2; resumed on 2 x 2 (data x tensor)."""
    recipe = small(folder, train_share=0.11, checkpoint_every_steps=3, keep_checkpoints=9)
    one = train_on(1, recipe, tmp_path / "one")
    both = replace(recipe, tensor_parallel=2, replicate=2)
    assert largest_difference(one, train_on(8, both, tmp_path / "run")) < 1e-10
    keep_one_checkpoint(tmp_path / "run", 3)
    resumed = train_on(4, replace(both, replicate=1), tmp_path / "run", None, True)
    assert largest_difference(one, resumed) < 1e-10


@pytest.mark.process
@pytest.mark.slow
def test_shards_beside_experts(folder: Path, tmp_path: Path) -> None:
    """On two workers and on data x tensor of 2 x 2; resumed on others, with shards or without."""
    recipe = small(
        folder,
        train_share=0.11,
        checkpoint_every_steps=3,
        keep_checkpoints=9,
        experts=4,
        capacity_factor=1.0,
    )
    one = train_on(1, recipe, tmp_path / "one")
    assert one[1].metrics["dropped"] > 0.01
    both = replace(recipe, tensor_parallel=2)
    assert largest_difference(one, train_on(2, recipe, tmp_path / "two")) < 1e-10
    assert largest_difference(one, train_on(3, recipe, tmp_path / "three")) < 1e-10  # three copies
    assert largest_difference(one, train_on(4, both, tmp_path / "four")) < 1e-10
    keep_one_checkpoint(tmp_path / "four", 3)
    for size, other in ((1, recipe), (2, recipe), (2, replace(recipe, shard=False))):
        run_dir = tmp_path / f"resumed-{size}-{other.shard}"
        shutil.copytree(tmp_path / "four", run_dir)
        resumed = train_on(size, other, run_dir, None, True)
        assert largest_difference(one, resumed) < 1e-10


@pytest.mark.process
@pytest.mark.slow
def test_shards_beside_experts_in_a_pipeline(folder: Path, tmp_path: Path) -> None:
    """Whose gradients torch drops, too, where a schedule finds out shapes."""
    recipe = small(folder, train_share=0.11, experts=4, pipeline=2)
    one = train_on(1, recipe, tmp_path / "one")
    assert largest_difference(one, train_on(4, recipe, tmp_path / "four")) < 1e-10


@pytest.mark.process
def test_experts_beside_shards_in_float16(folder: Path, tmp_path: Path) -> None:
    """Refused before the first step: torch's scaler takes no DTensors together with others."""
    recipe = small(folder, experts=4, precision="float16", train_share=0.07)
    with pytest.raises(RemoteError, match=r"`precision` \(='float16'\) .* take 'bfloat16'"):
        train_on(2, recipe, tmp_path / "run")


def test_copies_of_shards_that_do_not_divide_the_workers(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"`replicate` \(=3\) must divide the 4 workers"):
        small(folder, replicate=3, tensor_parallel=2).check_workers(8)


def overflow(model: nn.Module) -> None:
    """Of the first bias's gradient, in the rows of the last worker."""
    last = torch.distributed.get_world_size() - 1
    bias: Any = model.get_parameter("blocks.1.mlp.hidden.bias")
    if torch.distributed.get_rank() == last:
        bias.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().fill_(math.inf))


@pytest.mark.process
@pytest.mark.slow
def test_one_shards_bad_gradient_counts_on_all(folder: Path, tmp_path: Path) -> None:
    recipe = small(folder, train_share=0.07)
    with pytest.raises(RemoteError, match=r"blocks\.1\.mlp\.hidden\.bias"):
        train_on(2, recipe, tmp_path / "raised", overflow)
    for size, tensor in ((2, 1), (4, 2)):
        skipping = replace(recipe, nonfinite="skip", tensor_parallel=tensor)
        _, report = train_on(size, skipping, tmp_path / f"skipped-{size}", overflow)
        assert report.num_skipped == report.num_steps > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replicate": 2, "shard": False}, r"`replicate` \(=2\) counts the copies of shards"),
        ({"replicate": 0}, r"`replicate` \(=0\) must be"),
        ({"compression": "int8"}, r"`compression` \(='int8'\) is for a model that FSDP2"),
        ({"compile": True}, r"`compile` \(=True\) is for models that are whole"),
        ({"staleness": 1}, r"`staleness` \(=1\) is for models that are whole"),
        ({"noise_scale_every_steps": 2}, r"`noise_scale_every_steps` \(=2\) is for models that"),
    ],
)
def test_values_that_shard_refuses(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        small(folder, **changes)


def test_a_single_worker_has_the_whole_model(folder: Path) -> None:
    model = small(folder).task(Communicator.single_process()).model
    assert not any(hasattr(p, "full_tensor") for p in model.parameters())
