"""`text` with a transformer that torch's tensor parallelism divides: the run of one worker."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allstep import UsageError
from allstep.comm import shards_of
from allstep.errors import DisagreementError
from allstep.optim import NonfiniteGradientError
from allstep.recipes.text import Text
from tests.helpers.divided import (
    check_elastic_refused,
    divisible_text,
    keep_one_checkpoint,
    largest_difference,
    train_on,
    trainings_on,
)
from tests.helpers.processes import RemoteError
from tests.helpers.texts import check_three_workers_refused
from tests.nn.test_tensor_parallel import leave_gradients_unsummed


def small(folder: Path, **changes: Any) -> Text:
    usual = {"depth": 2, "optimizer": "lamb", "tensor_parallel": 2}
    return divisible_text(folder, **usual | changes)


# -- the same run on any layout of workers -------------------------------------------------------


@pytest.mark.process
@pytest.mark.slow
def test_tensor_parallel_on_any_layout(folder: Path, tmp_path: Path) -> None:
    """data x tensor of 1x1, 2x1, 1x2, 2x2; with dropout, clipping and uneven micro-batches."""
    recipe = small(folder, train_share=0.15)
    one = train_on(1, recipe, tmp_path / "one")
    assert one[1].num_steps >= 4
    undivided = replace(recipe, tensor_parallel=1)
    found = trainings_on(2, (undivided, tmp_path / "2-1"), (recipe, tmp_path / "2-2"))
    found.append(train_on(4, recipe, tmp_path / "4-2"))
    for other in found:
        assert largest_difference(one, other) < 1e-10
    unclipped = train_on(1, replace(recipe, clip_norm=None), tmp_path / "unclipped")
    assert largest_difference(one, unclipped) > 1e-6


@pytest.mark.process
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"samples": "paragraphs", "optimizer": "adamw"},
            marks=pytest.mark.slow,
            id="paragraphs",
        ),
        pytest.param({"objective": "masked", "train_share": 0.13}, id="masked"),
    ],
)
def test_tensor_parallel_of_other_samples(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Padded sequences of unequal lengths, weighed by tokens; and logits at some positions."""
    recipe = small(folder, **{"depth": 1, "train_share": 0.15} | changes)
    one, two = (train_on(size, recipe, tmp_path / f"{size}") for size in (1, 2))
    assert one[1].num_steps >= 4
    assert largest_difference(one, two) < 1e-10


@pytest.mark.process
def test_workers_whose_gradients_are_a_part_do_not_save(folder: Path, tmp_path: Path) -> None:
    """The control: without the sum over the tensor axis the norms of one model part."""
    recipe = small(folder, train_share=0.07)
    with pytest.raises((RemoteError, DisagreementError), match=r"blocks\.0\.attention_norm"):
        train_on(2, recipe, tmp_path / "run", leave_gradients_unsummed)


@pytest.mark.process
@pytest.mark.slow
def test_tensor_parallel_resumes_on_other_layouts(folder: Path, tmp_path: Path) -> None:
    """From a checkpoint of 2x2 in the middle of an epoch, whole; exact sums have the same bits."""
    recipe = small(
        folder,
        depth=1,
        train_share=0.15,
        compression="exact",
        checkpoint_every_steps=3,
        keep_checkpoints=9,
    )
    undisturbed = train_on(4, recipe, tmp_path / "run")
    keep_one_checkpoint(tmp_path / "run", 3)
    for size in (2, 1):
        run_dir = tmp_path / f"resumed-{size}"
        shutil.copytree(tmp_path / "run", run_dir)
        resumed = train_on(size, recipe, run_dir, None, True)
        assert len(list((run_dir / "checkpoints").iterdir())) > 1
        assert largest_difference(undisturbed, resumed) < 1e-10
        if size > 1:
            assert all(torch.equal(resumed[0][n], undisturbed[0][n]) for n in resumed[0])


@pytest.mark.process
@pytest.mark.slow
def test_exact_sums_over_the_data_axis(folder: Path, tmp_path: Path) -> None:
    """The bits of a layout depend on the tensor axis alone; without exact sums on both."""
    recipe = small(folder, depth=1, precision="float32", train_share=0.08)
    recipes = {name: replace(recipe, compression=name) for name in ("exact", "fp32")}
    bits = {}
    for size in (2, 4):
        runs = [(recipe, tmp_path / f"{name}-{size}") for name, recipe in recipes.items()]
        for compression, (state, _) in zip(recipes, trainings_on(size, *runs), strict=True):
            bits[compression, size] = state
    for compression, is_same in (("exact", True), ("fp32", False)):
        pairs = [(bits[compression, 2][n], bits[compression, 4][n]) for n in bits["exact", 2]]
        assert all(torch.equal(a, b) for a, b in pairs) == is_same


# -- a gradient that is not finite ---------------------------------------------------------------


def overflow(model: nn.Module) -> None:
    """The gradient of one worker's shard."""
    (shard, *_) = shards_of(model).values()
    if shard.comm.rank == 1:
        p = model.get_parameter("blocks.1.mlp.hidden.bias")
        p.register_hook(lambda gradient: gradient * math.inf)


@pytest.mark.process
def test_one_shards_bad_gradient_is_named_on_all(folder: Path, tmp_path: Path) -> None:
    recipe = small(folder, train_share=0.07)
    with pytest.raises(
        (RemoteError, NonfiniteGradientError), match=r"blocks\.1\.mlp\.hidden\.bias"
    ):
        train_on(2, recipe, tmp_path / "run", overflow)


@pytest.mark.process
def test_one_shards_bad_gradient_skips_the_step_on_all(folder: Path, tmp_path: Path) -> None:
    recipe = small(folder, train_share=0.07, nonfinite="skip")
    _, report = train_on(2, recipe, tmp_path / "run", overflow)
    assert report.num_skipped == report.num_steps > 0


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel": 0}, r"`tensor_parallel` \(=0\) must be at least 1"),
        ({"tensor_parallel": 3}, r"`heads` \(=4\) must be a multiple of `tensor_parallel` \(=3\)"),
        ({"vocab_size": 301}, r"`vocab_size` \(=301\) must be a multiple of `tensor_parallel`"),
        ({"sequence_length": 15}, r"`sequence_length` \(=15\) must be a multiple of `tensor_par"),
        (
            {"second_sequence_length": 17, "epochs": 2},
            r"`second_sequence_length` \(=17\) must be a",
        ),
        (
            {"experts": 64, "top_k": 64},
            r"`tensor_parallel` \(=2\) must divide the 1 hidden features of an expert",
        ),
        ({"compile": True}, r"`compile` \(=True\) is for models that are whole"),
        ({"compression": "int8"}, r"`compression` \(='int8'\) .* take one of fp32, bf16"),
        ({"staleness": 1}, r"`staleness` \(=1\) is for models that are whole"),
        ({"sync_every": 2}, r"`sync_every` \(=2\) is for models that are whole"),
        ({"noise_scale_every_steps": 2}, r"`noise_scale_every_steps` \(=2\) is for models that"),
        ({"shares": "measured"}, r"`shares` \(='measured'\) .* take 'equal' or numbers"),
    ],
)
def test_values_that_tensor_parallel_refuses(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        small(folder, **changes)


def test_workers_that_tensor_parallel_does_not_divide(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "`tensor_parallel` (=2) must divide the 3 workers, as that many share a copy of the"
    flags = ["--folder", str(folder), "--tensor-parallel", "2"]
    recipe = small(folder / "nowhere")
    check_three_workers_refused(recipe, flags, words, tmp_path / "run", capsys)


def test_tensor_parallel_is_not_elastic(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--folder", str(folder), "--tensor-parallel", "2"]
    check_elastic_refused(flags, tmp_path / "run", capsys)
