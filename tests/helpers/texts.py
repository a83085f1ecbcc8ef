"""Texts to train on that are on every machine, and what recipes of texts refuse."""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from allstep import UsageError
from allstep.cli.main import main
from tests.helpers.ranks import run_ranks


def write_topics(folder: Path, num_files: int, num_characters: int | None = None) -> Path:
    """Makes the folder, with the first of Python's help topics, a file each, or their start."""
    folder.mkdir()
    for name in sorted(topics)[:num_files]:
        (folder / f"{name}.txt").write_text(topics[name][:num_characters], encoding="utf-8")
    return folder


def check_three_workers_refused(
    recipe: Any, flags: list[str], words: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before a folder is made, a text is read or a worker starts.

    Args:
        recipe: of `text`, with a folder that is not there.
        flags: what makes the same recipe, with one that is.
        words: of the error.
        run_dir: of the run that is not begun.
        capsys: of the test.
    """
    arguments = ["train", "text", "--workers", "3", *flags, "--run-dir", str(run_dir)]
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
    assert not run_dir.exists()
    with pytest.raises(UsageError) as caught:
        run_ranks(3, recipe.task)
    assert words in str(caught.value)
