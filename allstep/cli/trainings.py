"""Runs several trainings side by side, each as `allstep train` does, in its own folder."""

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allstep import files
from allstep.cli import run_folder
from allstep.cli.exits import forget_exits
from allstep.cli.launch import Watch, Workers, signals_noted
from allstep.cli.output_files import writing_errors
from allstep.cli.train import train_worker
from allstep.cli.worker import last_lines, share_cores
from allstep.cli.workers import call_of, num_workers_to_start
from allstep.comm import Communicator
from allstep.device import num_devices
from allstep.env import num_cores, read_launch
from allstep.errors import UsageError, check_integer
from allstep.recipes import Recipe

# Imported once, where all workers are forked from; else each takes seconds to begin.
_PRELOAD = (
    "allstep.cli.trainings",
    "allstep.cli.summary",
    "torch._dynamo",
    "torch.utils.flop_counter",
    "torch.utils.tensorboard",
)
_POLL_S = 0.05
_NUM_LOG_LINES = 50


@dataclass(frozen=True)
class Training:
    """One of several trainings.

    Attributes:
        name: unlike the others', the folder's name too.
        recipe: with all its fields.
        run_dir: the run's folder.
        values: of the flags in which trainings differ.
    """

    name: str
    recipe: Recipe
    run_dir: Path
    values: Mapping[str, str] = field(default_factory=dict)

    def read_report(self) -> dict[str, Any] | None:
        """The run's report; None if it is not finished."""
        return run_folder.finished_report(self.run_dir, self.recipe)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training.

    Attributes:
        training: which.
        report: as in its `report.json`; None if it did not come to its end.
        failure: why it did not, where that was not Ctrl-C.
    """

    training: Training
    report: Mapping[str, Any] | None = None
    failure: str | None = None

    @property
    def state(self) -> str:
        """The training's state in a word."""
        if self.report is not None:
            return "finished"
        return "failed" if self.failure is not None else "open"

    @property
    def score(self) -> float:
        """The score of the comparison: the best of `best_metric`, else the last accuracy.

        NaN if there is none.
        """
        if self.report is None:
            return math.nan
        is_last = self.training.recipe.best is None
        value = self.report["metrics"].get("accuracy") if is_last else self.report["best_value"]
        return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Jobs:
    """The number of trainings at a time, and of workers for each."""

    num_jobs: int
    num_workers: int


def read_jobs(jobs: int | None, workers: int | None) -> Jobs:
    """The jobs of a command line; by default as many trainings as the cores allow.

    On GPUs one at a time, as each training takes the first ones.
    """
    launcher = read_launch().launcher
    if launcher != "none":
        raise UsageError(
            f"This command starts its trainings' workers itself, but {launcher} has started it:"
            " call it once, without a launcher."
        )
    num_workers = num_workers_to_start(1 if workers is None else workers)
    assert num_workers is not None
    if jobs is None:
        return Jobs(1 if num_devices() else max(1, num_cores() // num_workers), num_workers)
    check_integer("jobs", jobs, cure="leave it out for as many as the cores have room for")
    if num_devices() and jobs > 1:
        raise UsageError(
            f"`jobs` (={jobs}): trainings on GPUs run one at a time, on the first GPUs; leave it"
            " out."
        )
    return Jobs(jobs, num_workers)


def check_folders(trainings: Sequence[Training]) -> None:
    """Raises UsageError if a run's folder has another training, or one that is running."""
    for training in trainings:
        run_folder.find_run(training.recipe, training.run_dir)


def run_trainings(trainings: Sequence[Training], jobs: Jobs) -> tuple[list[Outcome], int | None]:
    """Runs or resumes the trainings that are not finished; leaves no process at the end.

    Each says what it came to as it ends, on standard error: standard output has the table only.
    SIGINT and SIGTERM are handed on: trainings end with a checkpoint, and no other begins.

    Args:
        trainings: in the order in which they begin.
        jobs: how many at a time.

    Returns:
        What became of each, in their order, and the signal that came.
    """
    found = {each.name: Outcome(each, each.read_report()) for each in trainings}
    waiting = [each for each in trainings if found[each.name].report is None]

    def end(outcome: Outcome) -> None:
        found[outcome.training.name] = outcome
        _tell(outcome)

    with (
        signals_noted() as came,
        tempfile.TemporaryDirectory(prefix="allstep-") as folder,
        ExitStack() as stack,
    ):
        running: list[tuple[Training, Watch]] = []
        while running or (waiting and not came):
            while waiting and not came and len(running) < jobs.num_jobs:
                training = waiting.pop(0)
                try:
                    workers = _workers(training, jobs, Path(folder) / training.name)
                except UsageError as error:  # its folder was taken meanwhile, or can't be written
                    end(Outcome(training, failure=str(error)))
                else:
                    running.append((training, Watch(stack.enter_context(workers), came)))
            for training, watch in list(running):
                if watch.look(_POLL_S / len(running)):
                    running.remove((training, watch))
                    end(_outcome(training, watch, is_stopped=bool(came)))
        return list(found.values()), came[0] if came else None


def _workers(training: Training, jobs: Jobs, folder: Path) -> Workers:
    folder.mkdir()
    run_dir = training.run_dir
    if run_folder.find_run(training.recipe, run_dir) is None:
        run_folder.make_run_dir(training.recipe.name, run_dir)
        run_folder.write_recipe(run_dir, training.recipe)
    forget_exits(run_dir)
    arguments = {"folder": str(run_dir), "num_jobs": jobs.num_jobs}
    call = call_of(folder, train_beside_others, arguments)
    return Workers(jobs.num_workers, *call, has_logs=True, preload=_PRELOAD)


def train_beside_others(comm: Communicator, folder: str, num_jobs: int) -> int:
    """Trains as one of a training's workers, on its share of the cores; returns its exit code.

    Args:
        comm: the training's workers.
        folder: the run's.
        num_jobs: trainings at a time.
    """
    share_cores(comm.local_size * num_jobs)
    return train_worker(comm, folder, resume=True)


def _outcome(training: Training, watch: Watch, *, is_stopped: bool) -> Outcome:
    if not watch.failed:
        return Outcome(training, training.read_report())
    if is_stopped:
        return Outcome(training)
    watch.write_exits(training.run_dir)
    if death := watch.words_of_death():
        return Outcome(training, failure=death)
    workers, rank = watch.workers, watch.root_cause
    lines = last_lines(workers.folder, rank, _NUM_LOG_LINES)
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    words = [*errors, *lines[-1:], f"it ended with code {workers.exit_codes[rank]}"]
    return Outcome(training, failure=words[0])


def _tell(outcome: Outcome) -> None:
    if outcome.report is not None:
        words = f"{outcome.score:.4f}"
    else:
        words = f"failed: {outcome.failure}" if outcome.failure else "ended with a checkpoint"
    print(f"{outcome.training.name}: {words}", file=sys.stderr, flush=True)


def write_json(path: Path, plain: Any) -> None:
    """Writes plain data as a JSON file, atomically."""
    with writing_errors(str(path)):
        files.write_json(path, plain, indent=1)
