"""A launcher keeps its run's folder to itself, also while none of its workers holds it."""

from collections.abc import Callable
from pathlib import Path

from allstep.cli.run_folder import write_recipe
from allstep.recipes.digits import Digits
from allstep.train.run_lock import launcher_lock, trainer_of


def test_another_launcher_changes_no_recipe_and_trains_nothing(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Workers that have not begun, or that regroup, hold nothing themselves."""
    write_recipe(tmp_path, Digits(lr=0.1))
    before = (tmp_path / "recipe.json").read_text()
    with launcher_lock(tmp_path):
        for line in (("digits", "--run-dir", str(tmp_path)), ("--resume", str(tmp_path))):
            assert "is being trained by process" in refused("train", *line)
        assert trainer_of(tmp_path) is not None
    assert (tmp_path / "recipe.json").read_text() == before
    assert trainer_of(tmp_path) is None
