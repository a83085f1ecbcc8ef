"""A run that ends between any two steps of writing or evaluating goes on with the same bits."""

import os
import pickle
import random
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import allstep
from allstep import Communicator
from allstep.errors import CheckpointError
from allstep.train.metrics import read_metrics
from allstep.train.storage import read_checkpoint
from tests.helpers import same_model
from tests.helpers.compare import differing_names
from tests.helpers.processes import Workers

OPTIONS = replace(same_model.OPTIONS, checkpoint_every_steps=2, keep_checkpoints=2)
FOLLOWING = replace(OPTIONS, best_metric="accuracy", best_mode="max")
_FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


class Moments:
    """Counts what a run does to its folder, and micro-batches of its evaluations."""

    def __init__(self, folder: Path, happens: Callable[[int], None]) -> None:
        self._folder = str(folder)
        self._happens = happens
        self.count = 0
        sys.addaudithook(self._hear)
        os.fsync = self._before(os.fsync)

    def next(self) -> None:
        self._happens(self.count)
        self.count += 1

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS and threading.current_thread() is threading.main_thread():
            path = str(args[0])
            if path.startswith(self._folder) and "tensorboard" not in path:
                self.next()

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.next()
            return function(*args)

        return counted


def train(run_dir: Path, happens: Callable[[int], None]) -> tuple[dict[str, Tensor], int]:
    """Starts the run or continues it; its parameters and how many moments it had."""
    moments = Moments(run_dir, happens)

    def metrics_of(model: Any, data: Any) -> Any:
        moments.next()
        return same_model.metrics_of(model, data)

    task = same_model.make_task("adamw")
    task = allstep.Task(**{**vars(task), "metrics": metrics_of})
    resume = any((run_dir / "checkpoints").glob("step-*"))
    allstep.fit(task, FOLLOWING, Communicator.single_process(), run_dir, resume=resume)
    return task.model.state_dict(), moments.count


def in_a_child(body: Callable[[], Any], result: Path) -> int:
    """Runs a body in a fork of this process, which has one thread; returns what it ended by."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            result.write_bytes(pickle.dumps(body()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def trained(run_dir: Path, result: Path) -> tuple[dict[str, Tensor], int]:
    """As `train`, in a child."""
    assert in_a_child(lambda: train(run_dir, lambda moment: None), result) == 0
    found: tuple[dict[str, Tensor], int] = pickle.loads(result.read_bytes())
    return found


def lives(folder: Path, number: signal.Signals, part: slice) -> list[str]:
    """Ends a run by a signal at each moment, continues it, compares; what went wrong."""
    result = folder / "result.pickle"
    expected, num_moments = trained(folder / "whole", result)
    records = read_metrics(folder / "whole")
    wrong = []
    for moment in range(num_moments)[part]:
        run_dir = folder / str(moment)

        def train_until(run_dir: Path = run_dir, moment: int = moment) -> None:
            train(run_dir, lambda now: os.kill(os.getpid(), number) if now == moment else None)

        code = in_a_child(train_until, result)
        if number == signal.SIGKILL and code != -number:
            wrong.append(f"moment {moment}: ended with {code}")
        state, _ = trained(run_dir, result)
        if differing_names(state, expected):
            wrong.append(f"moment {moment}: other parameters")
        if differing_names(best_of(run_dir), best_of(folder / "whole")):
            wrong.append(f"moment {moment}: another best checkpoint")
        if without_times(read_metrics(run_dir)) != without_times(records):
            wrong.append(f"moment {moment}: other metrics")
    return wrong + [f"only {num_moments} moments"] * (num_moments < 100)


def best_of(run_dir: Path) -> dict[str, Tensor]:
    """Its tensors, read with all checks."""
    model: dict[str, Tensor] = read_checkpoint(run_dir / "checkpoints" / "best")["model"]
    return model


def without_times(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.items() if name not in ("time", "samples_per_s")}
        for record in records
    ]


def full_disks(folder: Path, limits: list[int]) -> list[str]:
    """Ends a run by a limit of its files' size, continues it without; what went wrong."""
    result = folder / "result.pickle"
    expected, _ = trained(folder / "whole", result)
    wrong = []
    for limit in limits:
        run_dir = folder / str(limit)

        def fail(limit: int = limit, run_dir: Path = run_dir) -> str:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                train(run_dir, lambda moment: None)
            except CheckpointError as error:
                return str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (resource.RLIM_INFINITY,))
            return "it had room"

        in_a_child(fail, result)
        message = pickle.loads(result.read_bytes())
        if not re.search(
            r"(step-\d+|best|metrics.jsonl) could not be written .*Free some", message
        ):
            wrong.append(f"limit {limit}: {message}")
        if differing_names(trained(run_dir, result)[0], expected):
            wrong.append(f"limit {limit}: other parameters")
    return wrong


def test_an_evaluation_that_was_cut_short_is_made_when_the_run_goes_on(tmp_path: Path) -> None:
    def fail(model: Any, data: Any) -> Any:
        raise KeyboardInterrupt

    comm = Communicator.single_process()
    task = same_model.make_task("adamw")
    with pytest.raises(KeyboardInterrupt):
        allstep.fit(allstep.Task(**{**vars(task), "metrics": fail}), OPTIONS, comm, tmp_path)
    allstep.fit(same_model.make_task("adamw"), OPTIONS, comm, tmp_path, resume=True)
    found = [record["step"] for record in read_metrics(tmp_path) if "test/accuracy" in record]
    assert found == [4, 8]


@pytest.mark.process
def test_a_run_goes_on_after_files_could_not_be_written(tmp_path: Path) -> None:
    with Workers(1, full_disks, (tmp_path, [100, 500, 1_000, 4_000])) as workers:
        assert workers.results(timeout_s=100) == [[]]


@pytest.mark.process
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_run_ended_at_some_moments_of_its_writing(tmp_path: Path, number: int) -> None:
    first = random.Random(number).randrange(29)
    with Workers(1, lives, (tmp_path, number, slice(first, None, 29))) as workers:
        assert workers.results(timeout_s=100) == [[]]


@pytest.mark.parametrize(
    ("number", "first"),
    [
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.slow),
        *(pytest.param(signal.SIGKILL, first, marks=pytest.mark.long) for first in (1, 2, 3)),
        *(pytest.param(signal.SIGTERM, first, marks=pytest.mark.long) for first in range(4)),
    ],
)
def test_a_run_ended_at_any_moment_of_its_writing(tmp_path: Path, number: int, first: int) -> None:
    with Workers(1, lives, (tmp_path, number, slice(first, None, 4))) as workers:
        assert workers.results(timeout_s=600) == [[]]
