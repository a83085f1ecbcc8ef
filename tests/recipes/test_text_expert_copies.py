"""`text` with copies of experts, beside every other way to divide it: the run of one worker."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allstep.errors import UsageError
from allstep.recipes.text import Text
from tests.helpers.compare import differing_names
from tests.helpers.divided import (
    divisible_text,
    keep_one_checkpoint,
    largest_difference,
    train_on,
)


def small(folder: Path, **changes: Any) -> Text:
    usual = {"depth": 2, "experts": 4, "capacity_factor": 1.0, "train_share": 0.11}
    return divisible_text(folder, **usual | {"expert_copies": 2} | changes)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (4, {}),
        (8, {"tensor_parallel": 2}),
        (8, {"pipeline": 2, "global_batch": 60}),
        pytest.param(6, {"expert_copies": 3, "optimizer": "lamb"}, marks=pytest.mark.long),
        pytest.param(4, {"shard": True, "optimizer": "adamw"}, marks=pytest.mark.long),
        pytest.param(
            4,
            {"shard": True, "expert_copies": 4, "optimizer": "adamw"},
            marks=pytest.mark.long,
        ),
        pytest.param(3, {"expert_copies": None}, marks=pytest.mark.long),
        pytest.param(4, {"pipeline": 2}, marks=pytest.mark.long),
    ],
    ids=[
        *("copies", "tensor", "pipeline", "six", "shards", "shards of whole experts"),
        *("as few as divide", "whole experts in a pipeline"),
    ],
)
def test_copies_of_experts_are_the_same_model(
    size: int, changes: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """data x experts of 2 x 2, also x 2 of tensors or stages; dropout, clipping and drops."""
    recipe = small(folder, **changes)
    one = train_on(1, recipe, tmp_path / "one")
    assert one[1].metrics["dropped"] > 0.01
    assert largest_difference(one, train_on(size, recipe, tmp_path / "run")) < 1e-10


@pytest.mark.process
@pytest.mark.long
def test_exact_sums_of_copies(folder: Path, tmp_path: Path) -> None:
    """The same bits, also after a checkpoint of other copies."""
    recipe = small(folder, compression="exact", checkpoint_every_steps=2, keep_checkpoints=9)
    four = train_on(4, recipe, tmp_path / "4")
    keep_one_checkpoint(tmp_path / "4", 2)
    shutil.copytree(tmp_path / "4", tmp_path / "2")
    apart = replace(recipe, expert_copies=1)
    for size, other in ((1, recipe), (2, apart), (3, replace(recipe, expert_copies=None))):
        run_dir = tmp_path / f"on-{size}"
        shutil.copytree(tmp_path / "2", run_dir)
        assert not differing_names(train_on(size, other, run_dir, None, True)[0], four[0])
    assert not differing_names(train_on(2, apart, tmp_path / "new")[0], four[0])


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({"expert_copies": 3}, 4, r"`expert_copies` \(=3\) must divide the 4 workers"),
        (
            {"expert_copies": 1, "experts": 2},
            4,
            r"`experts` \(=2\) .* of the 4 workers, .* Or leave `expert_copies` out",
        ),
        (
            {"experts": 3, "tensor_parallel": 2},
            8,
            r"of the 2 copies of the model that have one of `expert_copies`, .* Or leave",
        ),
    ],
)
def test_copies_that_do_not_divide(
    changes: dict[str, Any], size: int, words: str, folder: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        small(folder, **changes).check_workers(size)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_copies": 0}, r"`expert_copies` \(=0\) must be"),
        ({"experts": None}, r"`expert_copies` \(=2\) counts copies of experts: give `experts`"),
    ],
)
def test_bad_copies(changes: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=words):
        small(folder, **changes)
