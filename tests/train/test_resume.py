"""kill -9 at any instant, resume, and end with the same bits."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allstep
from allstep import Communicator, TrainOptions
from allstep.errors import CheckpointError, UsageError
from allstep.train import Checkpoints, MeasuredRun, Run
from tests.helpers import same_model
from tests.helpers.compare import differing_names, state_difference
from tests.helpers.processes import Workers, run_processes, start_processes
from tests.helpers.ranks import run_ranks

NUM_PARTS = 4
NUM_KILLS = 20 // NUM_PARTS


def options_for(**changes: Any) -> TrainOptions:
    usual = {"epochs": 3, "checkpoint_every_steps": 2, "keep_checkpoints": 2}
    return replace(same_model.OPTIONS, **usual | changes)


def train(comm: Communicator, run_dir: str, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Starts the run, or continues it from its newest whole checkpoint."""
    task = same_model.make_task("adamw")
    folder = Path(run_dir) / "checkpoints"
    has_checkpoint = comm.broadcast_object(any(folder.glob("step-*")) if comm.rank == 0 else None)
    allstep.fit(task, options_for(**changes), comm, Path(run_dir), resume=has_checkpoint)
    return task.model.state_dict()


def train_slowly(comm: Communicator, run_dir: str, changes: dict[str, Any]) -> None:
    """As `train`, with steps long enough that a kill can hit anywhere in them."""
    forward = torch.nn.Linear.forward

    def slow_forward(self: torch.nn.Linear, x: Tensor) -> Tensor:
        time.sleep(0.005)
        return forward(self, x)

    torch.nn.Linear.forward = slow_forward  # type: ignore[method-assign]
    train(comm, run_dir, changes)


def die_while_saving(comm: Communicator, run_dir: str, changes: dict[str, Any]) -> None:
    """kill -9 of rank 0 by itself, at one of the moments of a checkpoint's writing."""
    moment = changes.pop("moment")
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == moment and comm.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    os.fsync = counted(os.fsync)
    os.rename = counted(os.rename)
    os.replace = counted(os.replace)
    train(comm, run_dir, changes)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    run_dir = str(tmp_path_factory.mktemp("uninterrupted"))
    result: dict[str, Tensor] = run_processes(2, train, run_dir, {})[0]
    return result


@pytest.mark.process
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.slow if part < 2 else pytest.mark.long)
        for part in range(NUM_PARTS)
    ],
)
def test_resume_after_kill_9_at_twenty_instants_bit_for_bit(
    part: int, uninterrupted: dict[str, Tensor], tmp_path: Path
) -> None:
    """Kills of one or of all workers, with loader processes prefetching in every other life."""
    chance = random.Random(part)
    num_killed = num_resumed_in_the_middle = 0
    for attempt in range(3 * NUM_KILLS):
        run_dir = tmp_path / str(attempt)
        loader_workers = 2 * (attempt % 2)
        with start_life(attempt, str(run_dir), loader_workers, chance) as workers:
            workers.join(timeout_s=60)
            num_killed += -signal.SIGKILL in workers.exit_codes
        num_resumed_in_the_middle += any((run_dir / "checkpoints").glob("step-*"))
        for result in run_processes(2, train, str(run_dir), {"loader_workers": loader_workers}):
            assert not differing_names(result, uninterrupted)
        if num_killed == NUM_KILLS:
            break
    assert num_killed == NUM_KILLS
    assert num_resumed_in_the_middle >= NUM_KILLS // 2


def wait_for_step(step: int, run_dir: str) -> None:
    """Waits until a run has saved a step, however slow the machine is."""
    checkpoints = Path(run_dir) / "checkpoints"
    while step and not any(
        int(found.name.removeprefix("step-")) >= step for found in checkpoints.glob("step-*")
    ):
        time.sleep(0.01)


def start_life(attempt: int, run_dir: str, loader_workers: int, chance: random.Random) -> Workers:
    """Starts a run that is killed: while it saves, or at some instant, one or all workers."""
    if attempt % 4 == 3:
        changes = {"loader_workers": loader_workers, "moment": chance.randrange(1, 16)}
        return start_processes(2, die_while_saving, run_dir, changes)
    workers = start_processes(2, train_slowly, run_dir, {"loader_workers": loader_workers})
    wait_for_step(2 * chance.randrange(6), run_dir)
    time.sleep(chance.uniform(0, 0.2))
    workers.kill(*[[0], [1], [0, 1]][attempt % 3])
    return workers


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_resume_on_another_number_of_workers(
    num_workers: int, uninterrupted: dict[str, Tensor], tmp_path: Path
) -> None:
    run_processes(2, train, str(tmp_path), {"epochs": 2})
    for result in run_processes(num_workers, train, str(tmp_path), {}):
        assert state_difference(result, uninterrupted) < 1e-10


def resume_with(changes: dict[str, Any], run_dir: Path) -> None:
    options = options_for(**changes)
    allstep.fit(
        same_model.make_task("adamw"), options, Communicator.single_process(), run_dir, resume=True
    )


def test_resume_of_a_run_that_has_ended_reports_its_checkpoint(tmp_path: Path) -> None:
    comm = Communicator.single_process()
    paths = []
    for _ in range(2):
        task, options = same_model.make_task("adamw"), options_for(epochs=1)
        paths.append(allstep.fit(task, options, comm, tmp_path, resume="auto").checkpoint)
    assert paths == 2 * [tmp_path / "checkpoints/step-00000004"]


def test_resume_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in .*Train anew, in another"):
        resume_with({}, tmp_path)


def test_resume_with_other_options_is_refused(tmp_path: Path) -> None:
    train(Communicator.single_process(), str(tmp_path), {"epochs": 1})
    with pytest.raises(
        CheckpointError, match=r"`seed` \(=12\) differs from the checkpoint's \(=11\)"
    ):
        resume_with({"seed": 12}, tmp_path)


def test_resume_on_another_training_set_is_refused(tmp_path: Path) -> None:
    """A position in it would be one in another order."""
    comm = Communicator.single_process()
    train(comm, str(tmp_path), {"epochs": 1})
    task = replace(same_model.make_task("adamw"), train_set=same_model.Images(50))
    with pytest.raises(CheckpointError, match=r"`num_samples` \(=\[50\]\) differs from the check"):
        allstep.fit(task, options_for(), comm, tmp_path, resume=True)
    with closing(Run(task, options_for(), comm)) as trained:  # which does not go on
        Checkpoints(tmp_path / "checkpoints", comm).restore(MeasuredRun(trained))
        assert trained.step == 4 and trained.evaluate()


def test_resume_of_a_task_that_says_what_else_must_not_change(tmp_path: Path) -> None:
    def task(labels: str) -> allstep.Task:
        return replace(same_model.make_task("adamw"), kept={"labels": labels})

    comm = Communicator.single_process()
    allstep.fit(task("cat, dog"), options_for(epochs=1), comm, tmp_path)
    words = r"`labels` \(=dog, cat\) differs from the checkpoint's \(=cat, dog\).*Give it the data"
    with pytest.raises(CheckpointError, match=words):
        allstep.fit(task("dog, cat"), options_for(), comm, tmp_path, resume=True)
    allstep.fit(task("cat, dog"), options_for(), comm, tmp_path, resume=True)


def test_resume_of_a_checkpoint_that_does_not_tell_its_data(tmp_path: Path) -> None:
    comm = Communicator.single_process()
    train(comm, str(tmp_path), {"epochs": 1})
    checkpoints = Checkpoints(tmp_path / "checkpoints", comm)
    found = checkpoints.load_latest()
    assert found is not None
    step, state = found
    del state["data"]
    checkpoints.save(step + 1, state)
    resume_with({}, tmp_path)


def test_fit_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    train(Communicator.single_process(), str(tmp_path), {"epochs": 1})
    with pytest.raises(UsageError, match=r"holds a run's checkpoints .* step 4"):
        allstep.fit(
            same_model.make_task("adamw"), options_for(), Communicator.single_process(), tmp_path
        )


def test_resume_without_checkpoints_on_every_rank(tmp_path: Path) -> None:
    def resume(comm: Communicator) -> None:
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            allstep.fit(same_model.make_task("adamw"), options_for(), comm, tmp_path, resume=True)

    run_ranks(2, resume)
