"""A vocabulary that is learned from texts which have been edited since."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import allstep
from allstep import Communicator
from allstep.errors import CheckpointError
from allstep.recipes import recipe_to_plain
from allstep.train import Checkpoints, Run
from tests.helpers.small_recipes import (
    small_bert,
    small_finetune,
    small_text,
    write_classes,
    write_sentences,
)

OTHER = r"`vocabulary` \(=\w+\) differs from the checkpoint's \(=\w+\)"
COMM = Communicator.single_process()


def train(recipe: Any, run_dir: Path) -> None:
    allstep.fit(recipe.task(COMM), recipe, COMM, run_dir)
    (run_dir / "recipe.json").write_text(json.dumps(recipe_to_plain(recipe)))


def swap_letters(folder: Path) -> None:
    """As many tokens as before, with other numbers."""
    for path in folder.glob("*.txt"):
        path.write_text(path.read_text().translate(str.maketrans("eq", "qe")))


@pytest.mark.parametrize("small", [small_text, pytest.param(small_bert, marks=pytest.mark.slow)])
def test_a_run_does_not_go_on_with_another_vocabulary(
    small: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = small(write_sentences(tmp_path / "texts"), epochs=1, second_sequence_length=None)
    train(recipe, tmp_path / "run")
    before = len(recipe.task(COMM).train_set)
    swap_letters(recipe.folder)
    task = recipe.task(COMM)
    assert len(task.train_set) == before
    with pytest.raises(CheckpointError, match=OTHER + ".*Give it the data that it began with"):
        allstep.fit(task, recipe, COMM, tmp_path / "run", resume=True)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", COMM)
    with (
        closing(Run(recipe.task(COMM), recipe, COMM)) as run,
        pytest.raises(CheckpointError, match=OTHER),
    ):
        checkpoints.restore(run)
    swap_letters(recipe.folder)
    allstep.fit(recipe.task(COMM), recipe, COMM, tmp_path / "run", resume=True)


def test_fine_tuning_does_not_begin_with_another_vocabulary(tmp_path: Path) -> None:
    recipe = small_bert(write_sentences(tmp_path / "texts"), epochs=1, second_sequence_length=None)
    train(recipe, tmp_path / "run")
    tuned = small_finetune(write_classes(tmp_path / "classes"), pretrained=tmp_path / "run")
    train(tuned, tmp_path / "tuned")
    swap_letters(recipe.folder)
    with pytest.raises(CheckpointError, match=f"`pretrained` .*{OTHER}.*texts as they were"):
        tuned.task(COMM)

    train(recipe, tmp_path / "again")  # another model in the place of the first
    (tmp_path / "run").rename(tmp_path / "first")
    (tmp_path / "again").rename(tmp_path / "run")
    with pytest.raises(CheckpointError, match=OTHER):
        allstep.fit(tuned.task(COMM), tuned, COMM, tmp_path / "tuned", resume=True)


def test_a_run_that_did_not_keep_its_vocabulary_is_taken(tmp_path: Path) -> None:
    recipe = small_bert(write_sentences(tmp_path / "texts"), epochs=1, second_sequence_length=None)
    train(recipe, tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", COMM)
    found = checkpoints.load_latest()
    assert found is not None
    step, state = found
    del state["data"]["vocabulary"]
    checkpoints.save(step + 1, state)
    small_finetune(write_classes(tmp_path / "classes"), pretrained=tmp_path / "run").task(COMM)
    allstep.fit(recipe.task(COMM), recipe, COMM, tmp_path / "run", resume=True)
