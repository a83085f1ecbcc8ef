"""A run's folder: `recipe.json`, checkpoints, metrics and, at the end, `report.json`."""

import contextlib
import os
import shlex
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from allstep.cli.output_files import writing_errors
from allstep.comm import Communicator
from allstep.env import read_agent_id
from allstep.errors import UsageError, nearest_names
from allstep.files import json_text, read_json, write_json, write_whole
from allstep.recipes import (
    RECIPE_FILE,
    AnyRecipe,
    DividedRecipe,
    Recipe,
    read_recipe_file,
    recipe_from_plain,
    recipe_to_plain,
)
from allstep.train import taken_by, trainer_of, writing

_REPORT = "report.json"
_STARTER = ".started-by"  # torchrun's agent, whose restarts go on with the run


def data_parallel(recipe: AnyRecipe) -> Recipe:
    """The recipe, if its workers share out the samples of each step.

    Raises:
        UsageError: if its workers don't share out the samples of each step.
    """
    if isinstance(recipe, DividedRecipe) or recipe.trains_itself is not None:
        raise UsageError(
            f"Recipe `{recipe.name}` {recipe.trains_itself} and runs as a whole: this is for"
            " recipes whose workers share out the samples of each step. What a finished run came to"
            " is in its report.json."
        )
    return recipe


def make_run_dir(recipe_name: str, run_dir: Path | None) -> Path:
    """Makes the folder of a new run; `runs/RECIPE-DATE-TIME` if none is given."""
    if run_dir is not None:
        check_not_in_training(run_dir)
        if _has_begun(run_dir):
            raise UsageError(
                f"`run_dir` (={run_dir}) holds a run already: continue it with"
                f" `allstep train --resume {run_dir}`, or choose another folder; `--resume auto`"
                " does whichever fits."
            )
        make_folder(run_dir, "run_dir")
        _note_starter(run_dir)
        return run_dir
    stem = usual_folder("runs", recipe_name)
    attempt = 1
    while True:
        path = stem if attempt == 1 else stem.with_name(f"{stem.name}-{attempt}")
        try:
            make_folder(path, "run_dir", exist_ok=False)
        except FileExistsError:
            attempt += 1
        else:
            _note_starter(path)
            return path


def usual_folder(parent: str, recipe_name: str) -> Path:
    """The name of a new folder."""
    return Path(parent) / f"{recipe_name}-{datetime.now():%Y%m%d-%H%M%S}"


def _has_begun(run_dir: Path) -> bool:
    """Whether a folder has more of a run than its recipe; a run that was refused has not."""
    traces = (run_dir / "checkpoints", run_dir / "metrics.jsonl", run_dir / _REPORT)
    return is_run(run_dir) and any(path.exists() for path in traces)


def _note_starter(run_dir: Path) -> None:
    starter = read_agent_id()
    if starter is not None:
        with writing_errors(f"`run_dir` (={run_dir})"):
            (run_dir / _STARTER).write_text(starter, encoding="utf-8")


def _is_own(run_dir: Path) -> bool:
    """Whether this launch began the run, in an earlier attempt."""
    try:
        return (run_dir / _STARTER).read_text(encoding="utf-8") == read_agent_id()
    except FileNotFoundError:
        return False


def find_run(recipe: AnyRecipe, run_dir: Path | None, *, of_any_launch: bool = True) -> Path | None:
    """The folder of an earlier run of this recipe; None if there is none.

    Args:
        recipe: with all its fields.
        run_dir: the run's folder; None for the one that this launch has made in an earlier attempt.
        of_any_launch: whether another launch may have begun it.
    """
    if run_dir is None:
        files = Path("runs").glob(f"{recipe.name}-*/{_STARTER}")
        run_dir = max(filter(_is_own, (file.parent for file in files)), default=None)
    if run_dir is None or not is_run(run_dir):
        return None
    if not (of_any_launch or _is_own(run_dir)):
        return None
    check_not_in_training(run_dir)
    before = read_recipe(run_dir, argument="run_dir")
    if before != recipe:
        if not _has_begun(run_dir):
            return None
        raise UsageError(
            f"`run_dir` (={run_dir}) holds another training ({first_difference(before, recipe)}):"
            f" give the same flags, continue it with `allstep train --resume {run_dir}`, or choose"
            " another folder."
        )
    return run_dir


def first_difference(before: AnyRecipe, recipe: AnyRecipe) -> str:
    """The first field in which two recipes differ."""
    if before.name != recipe.name:
        return f"recipe {before.name}, not {recipe.name}"
    values = ((f.name, getattr(before, f.name), getattr(recipe, f.name)) for f in fields(recipe))
    return next(f"{name} {old}, not {new}" for name, old, new in values if old != new)


def make_folder(path: Path, argument: str, *, exist_ok: bool = True) -> None:
    """Makes a folder that an argument names.

    Raises:
        FileExistsError: if it is there, unless that is `exist_ok`.
        UsageError: if it can't be made, or is a file.
    """
    for link in (path, *path.parents):
        if link.is_symlink() and not link.exists():
            raise UsageError(
                f"`{argument}` (={path}) can't be made: {link} is a link that leads nowhere, to"
                f" {os.readlink(link)}; make that folder, mount it, or remove the link."
            )
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if not exist_ok:
            raise
        raise UsageError(f"`{argument}` (={path}) is a file; give a folder.") from None
    except OSError as error:
        raise UsageError(
            f"`{argument}` (={path}) can't be made ({error.strerror}); choose another folder."
        ) from None


def write_recipe(run_dir: Path, recipe: AnyRecipe) -> None:
    """Writes `recipe.json`, whole or not at all."""
    with writing_errors(f"`run_dir` (={run_dir})"):
        write_json(run_dir / RECIPE_FILE, recipe_to_plain(recipe))


def read_recipe(run_dir: Path, *, argument: str) -> AnyRecipe:
    """The recipe of an existing run.

    Args:
        run_dir: the run's folder.
        argument: what the caller names it, for messages.
    """
    if not run_dir.is_dir():
        raise UsageError(f"`{argument}` (={run_dir}) is no folder; {_list_runs(run_dir)}")
    try:
        return read_recipe_file(run_dir / RECIPE_FILE)
    except FileNotFoundError:
        around = [parent for parent in run_dir.parents if (parent / RECIPE_FILE).is_file()]
        hint = f"; did you mean `{around[0]}`?" if around else "."
        raise UsageError(
            f"`{argument}` (={run_dir}) has no {RECIPE_FILE}: it is no run of `allstep train`{hint}"
        ) from None


def share_run(comm: Communicator, folder: str | None) -> tuple[AnyRecipe, Path]:
    """Recipe and folder of a run, on all workers; rank 0 alone reads the disk. Collective.

    Args:
        comm: the workers.
        folder: the run's; needed on rank 0 only.
    """
    plain = None
    if comm.rank == 0:
        assert folder is not None
        plain = recipe_to_plain(read_recipe(Path(folder), argument="run")), folder
    received = comm.broadcast_object(plain)
    return recipe_from_plain(received[0]), Path(received[1])


def with_fitting_shares(recipe: AnyRecipe, comm: Communicator) -> AnyRecipe:
    """A run's recipe for the present workers: shares for another number become equal ones.

    They decide who computes what, and nothing else.
    """
    num_workers = comm.size // recipe.copy_size
    if isinstance(recipe, DividedRecipe) or shares_fit(recipe, num_workers):
        return recipe
    if comm.rank == 0:
        print(f"`shares` (={recipe.shares}) are not of {num_workers} workers: they get equal ones")
    return replace(recipe, shares="equal")


def shares_fit(recipe: Recipe, num_workers: int) -> bool:
    """Whether `shares`, if they are numbers, are for the present number of workers."""
    shares = recipe.loader_shares
    return isinstance(shares, str) or len(shares) == num_workers


def check_has_checkpoint(run_dir: Path) -> None:
    """Raises UsageError if the run has no checkpoint; the message says how to get one."""
    if has_checkpoint(run_dir):
        return
    trainer = trainer_of(run_dir)
    if trainer is not None:
        raise UsageError(
            f"`run` (={run_dir}) has no checkpoint yet: it is being trained by {trainer}."
        )
    raise UsageError(
        f"`run` (={run_dir}) has no checkpoint: it ended before the first one was written;"
        f" train it: `{resume_command(run_dir, 1)}`."
    )


def check_not_in_training(run_dir: Path) -> None:
    """Raises UsageError if a process trains in the folder now."""
    trainer = trainer_of(run_dir)
    if trainer is not None:
        raise UsageError(taken_by(run_dir, trainer))


def is_run(run_dir: Path) -> bool:
    """Whether `allstep train` has begun a run in a folder."""
    return (run_dir / RECIPE_FILE).exists()


def has_checkpoint(run_dir: Path) -> bool:
    """Whether a run has a checkpoint."""
    return any((run_dir / "checkpoints").glob("step-*"))


def can_resume(run_dir: Path) -> bool:
    """Whether `allstep train --resume` can continue a run."""
    return is_run(run_dir) and has_checkpoint(run_dir)


def _list_runs(run_dir: Path) -> str:
    siblings = [
        str(path.parent)
        for path in run_dir.parent.glob(f"*/{RECIPE_FILE}")
        if path.parent != run_dir
    ]
    return nearest_names(str(run_dir), siblings) if siblings else "see `runs/` for your runs."


def note_launch(run_dir: Path, **launch: object) -> None:
    """Records in `recipe.json` how the run is launched, for `resume_command`.

    On a full disk it leaves nothing.

    Args:
        run_dir: of a run whose recipe is written.
        launch: flags of `allstep train` that must be given again, beside the number of workers.
    """
    with contextlib.suppress(OSError):
        plain = read_json(run_dir / RECIPE_FILE)
        if plain.pop("launch", {}) != launch:
            write_json(run_dir / RECIPE_FILE, plain | ({"launch": launch} if launch else {}))


def _read_launch(run_dir: Path) -> dict[str, Any]:
    """The record of `note_launch`; empty if there is none, or it can't be read."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        launch: dict[str, Any] = read_json(run_dir / RECIPE_FILE)["launch"]
        return launch
    return {}


def resume_command(run_dir: Path, num_workers: int) -> str:
    """The command line that continues a run, launched as it was.

    Args:
        run_dir: the run's folder.
        num_workers: that trained last; of an elastic run at least as many as may not be missing.
    """
    launch = _read_launch(run_dir)
    num_workers = max(num_workers, launch.get("min_workers", 1))
    words = [f"--workers {num_workers}"] if num_workers > 1 else []
    for name, value in launch.items():
        flag = f"--{name.replace('_', '-')}"
        words.append(flag if value is True else f"{flag} {value}")
    return " ".join(["allstep train --resume", shlex.quote(str(run_dir)), *words])


def write_report(run_dir: Path, report: dict[str, Any]) -> None:
    """Writes `report.json`."""
    with writing(run_dir / _REPORT):
        write_whole(run_dir / _REPORT, json_text(report))


def finished_report(run_dir: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The report of a finished run; None for a run that is not finished."""
    try:
        report: dict[str, Any] = read_json(run_dir / _REPORT)
        is_over = report["num_epochs"] >= recipe.epochs or report.get("stopped_early", False)
        is_finished = is_over and report["interrupted"] is None and "num_steps" in report
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # none, or damaged
        return None
    return report if is_finished else None


def forget_report(run_dir: Path) -> None:
    """Deletes the report of an earlier, interrupted part of the run."""
    (run_dir / _REPORT).unlink(missing_ok=True)


def has_report(run_dir: Path) -> bool:
    """Whether a run's workers have finished and written its report."""
    return (run_dir / _REPORT).exists()
