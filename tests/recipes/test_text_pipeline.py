"""`text` with a transformer in stages on several workers: the run of one worker."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from allstep import UsageError
from allstep.optim import NonfiniteGradientError
from allstep.recipes.text import Text
from tests.helpers.divided import (
    check_elastic_refused,
    divisible_text,
    keep_one_checkpoint,
    largest_difference,
    train_on,
)
from tests.helpers.processes import RemoteError
from tests.helpers.texts import check_three_workers_refused


def small(folder: Path, **changes: Any) -> Text:
    usual = {"depth": 4, "train_share": 0.3, "pipeline": 2}
    return divisible_text(folder, **usual | changes)


# -- the same run on any layout of workers -------------------------------------------------------


@pytest.mark.process
@pytest.mark.slow
def test_pipeline_on_any_layout(folder: Path, tmp_path: Path) -> None:
    """data x pipeline x tensor of 1x4x1, 2x2x1 and 1x2x2; dropout, clipping, uneven batches."""
    one = train_on(1, small(folder), tmp_path / "one")
    assert one[1].num_steps >= 8
    assert set(one[1].metrics) == {"loss", "unigram", "accuracy"}
    for size, pipeline, tensor in ((4, 4, 1), (4, 2, 1), (4, 2, 2)):
        recipe = small(folder, pipeline=pipeline, tensor_parallel=tensor)
        found = train_on(size, recipe, tmp_path / f"{size}-{pipeline}-{tensor}")
        assert largest_difference(one, found) < 1e-10
    unclipped = train_on(1, small(folder, clip_norm=None), tmp_path / "unclipped")
    assert largest_difference(one, unclipped) > 1e-6


@pytest.mark.process
@pytest.mark.slow
def test_hidden_tokens_are_predicted_in_a_pipeline(folder: Path, tmp_path: Path) -> None:
    """Their positions go through the stages; and the norm is that of all of them."""
    masked = {"objective": "masked", "train_share": 0.05, "held_out": 0.02, "depth": 2}
    one = train_on(1, small(folder, **masked), tmp_path / "one")
    two = train_on(2, small(folder, **masked), tmp_path / "two")
    assert largest_difference(one, two) < 1e-10
    assert two[1].samples_per_s > 0


@pytest.mark.process
@pytest.mark.slow
def test_bfloat16_in_a_pipeline_is_that_of_one_worker(folder: Path, tmp_path: Path) -> None:
    """Under autocast, in which a schedule has backward passes as well; float32 is the control."""
    half = small(folder, precision="bfloat16", train_share=0.1, held_out=0.02)
    one, two = (train_on(size, half, tmp_path / f"{size}") for size in (1, 2))
    full = small(folder, precision="float32", train_share=0.1, held_out=0.02)
    of_full = train_on(1, full, tmp_path / "full")
    assert largest_difference(one, two) < 1e-3 * largest_difference(one, of_full)


@pytest.mark.process
@pytest.mark.slow
def test_pipeline_resumes_on_other_layouts(folder: Path, tmp_path: Path) -> None:
    """From a checkpoint of 1x2x2 in the middle of an epoch; exact sums have the same bits."""
    saving = {"compression": "exact", "checkpoint_every_steps": 5, "keep_checkpoints": 9}
    recipe = small(folder, **saving, tensor_parallel=2)
    undisturbed = train_on(4, recipe, tmp_path / "run")
    keep_one_checkpoint(tmp_path / "run", 5)
    for size, pipeline, tensor in ((4, 4, 1), (1, 2, 1)):
        run_dir = tmp_path / f"resumed-{size}-{pipeline}"
        shutil.copytree(tmp_path / "run", run_dir)
        other = small(folder, **saving, pipeline=pipeline, tensor_parallel=tensor)
        resumed = train_on(size, other, run_dir, None, True)
        assert len(list((run_dir / "checkpoints").iterdir())) > 1
        assert largest_difference(undisturbed, resumed) < 1e-10


# -- a gradient that is not finite ---------------------------------------------------------------


def overflow(model: nn.Module) -> None:
    """The gradient of the last stage's worker."""
    for name, p in model.named_parameters():
        if name.endswith("stages.3.logits.weight"):
            p.register_hook(lambda gradient: gradient * math.inf)


@pytest.mark.process
def test_one_stages_bad_gradient_is_named_on_all(folder: Path, tmp_path: Path) -> None:
    recipe = small(folder, train_share=0.1)
    with pytest.raises((RemoteError, NonfiniteGradientError), match=r"stages\.3\.logits\.weight"):
        train_on(2, recipe, tmp_path / "run", overflow)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline": 0}, r"`pipeline` \(=0\) must be at least 1"),
        ({"pipeline": 3}, r"`depth` \(=4\) must be a multiple of `pipeline` \(=3\)"),
        ({"experts": 4, "sync_every": 2}, r"`sync_every` \(=2\) is for models that are whole"),
        ({"samples": "paragraphs"}, r"`samples` \(='paragraphs'\) have another length in each"),
        ({"compile": True}, r"`compile` \(=True\) is for models that are whole"),
        ({"staleness": 1}, r"`staleness` \(=1\) is for models that are whole"),
        ({"noise_scale_every_steps": 2}, r"`noise_scale_every_steps` \(=2\) is for models that"),
    ],
)
def test_values_that_a_pipeline_refuses(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        small(folder, **changes)


def test_workers_that_a_pipeline_does_not_divide(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "`pipeline` (=2) must divide the 3 workers, as that many share a copy of the"
    flags = ["--folder", str(folder), "--pipeline", "2"]
    check_three_workers_refused(small(folder / "nowhere"), flags, words, tmp_path / "run", capsys)
    with pytest.raises(UsageError, match=r"`pipeline` \(=2\) x `tensor_parallel` \(=2\) must"):
        small(folder, tensor_parallel=2).check_workers(6)
    with pytest.raises(UsageError, match=r"needs 2 micro-batches of each of 3 copies .* are 1"):
        small(folder).check_workers(6)


def test_pipeline_is_not_elastic(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--folder", str(folder), "--pipeline", "2"]
    check_elastic_refused(flags, tmp_path / "run", capsys)
