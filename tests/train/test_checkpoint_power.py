"""Checkpoints when a writer is killed at any call of the disk, the disk is full, or power fails."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from allstep.comm import Communicator
from allstep.errors import CheckpointError
from allstep.train.checkpoint import Checkpoints
from allstep.train.storage import read_checkpoint, verify
from tests.helpers.simulation.disk import SimulatedDisk, no_space
from tests.helpers.simulation.scheduler import KilledError, Process
from tests.helpers.simulation.scratch import scratch
from tests.helpers.simulation.volume import Volume

NUM_SEEDS = 5  # of what is lost with the power


class Calls:
    """Counts the calls of a process, which is killed at one of them, or finds the disk full."""

    def __init__(self, *, dies_at: float = math.inf, full_at: float = math.inf) -> None:
        self._dies_at, self._full_at = dies_at, full_at
        self.count = 0

    def __call__(self, takes_space: bool) -> None:
        self.count += 1
        if self.count >= self._dies_at:  # nor does what follows in a `finally` happen
            raise KilledError
        if self.count == self._full_at and takes_space:
            raise no_space()


class Site:
    """A disk and the processes that use it, one after the other."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self._volume, self._numbers = Volume(root), itertools.count()

    def checkpoints(self, calls: Callable[[bool], None]) -> Checkpoints:
        """Those of a new process; the ones before have ended."""
        process = Process(next(self._numbers))
        disk = SimulatedDisk(
            self._volume, process, calls, lambda pid: pid == process.number, time.monotonic
        )
        folder = self._volume.root / "run" / "checkpoints"
        return Checkpoints(folder, Communicator.single_process(), keep=1, disk=disk)

    def save_best(self, step: int, calls: Callable[[bool], None]) -> bool:
        """In a new process; whether it has come to the end."""
        try:
            self.checkpoints(calls).save_best(step, a_state(step))
        except KilledError:
            return False
        return True

    def lose_power(self, seed: int) -> None:
        self._volume.lose_power(lambda host: True, Random(seed))

    def best_step(self) -> int:
        """That of the best checkpoint, which must be there and whole."""
        found = self.checkpoints(Calls()).load_best()
        assert found is not None
        step, state = found
        assert torch.equal(state["x"], a_state(step)["x"])
        return step


def a_state(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((3,), float(step))}


def count_calls(root: Path, save: Callable[[Checkpoints], object]) -> int:
    """Of a process that saves something where there is an older one."""
    site, calls = Site(root), Calls()
    checkpoints = site.checkpoints(Calls())
    checkpoints.save(1, a_state(1))
    checkpoints.save_best(1, a_state(1))
    save(site.checkpoints(calls))
    return calls.count


def call_that_leaves(names: set[str], folder: Path) -> int:
    """That at which a writer of the second best checkpoint is killed and these names are there."""
    for dies_at in itertools.count(1):
        site = Site(folder / f"left {dies_at}")
        site.save_best(1, Calls())
        assert not site.save_best(2, Calls(dies_at=dies_at))
        if {path.name for path in site.checkpoints(Calls()).folder.iterdir()} == names:
            return dies_at
    raise AssertionError


def is_refused(save: Callable[[], object]) -> bool:
    """Whether a full disk has kept it from being saved."""
    try:
        save()
    except CheckpointError as error:
        return "No space left" in str(error)
    return False


def read_best(checkpoints: Checkpoints) -> int:
    """The step of the best checkpoint, as it lies there."""
    step = int(read_checkpoint(checkpoints.best_path)["x"][0])
    assert verify(checkpoints.best_path)["step"] == step
    return step


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch() as path:
        yield path


def test_power_fails_behind_a_save(folder: Path) -> None:
    """The first one, too, whose folders were not there before."""
    for seed in range(NUM_SEEDS):
        site = Site(folder / str(seed))
        for step in (1, 2):
            assert site.save_best(step, Calls())
            site.lose_power(seed)
            assert site.best_step() == step


@pytest.mark.parametrize("others_sweep", [False, True])
def test_power_fails_in_a_save(others_sweep: bool, folder: Path) -> None:
    """What a killed writer has moved aside stays until the new one's name is on the disk."""
    num_calls = count_calls(folder / "whole", lambda x: x.save_best(2, a_state(2)))
    for dies_at, seed in itertools.product(range(1, num_calls + 1), range(NUM_SEEDS)):
        site = Site(folder / f"{dies_at} {seed}")
        site.save_best(1, Calls())
        assert not site.save_best(2, Calls(dies_at=dies_at))
        if others_sweep:
            assert site.best_step() in (1, 2)
        site.lose_power(dies_at * NUM_SEEDS + seed)
        assert site.best_step() in (1, 2)


def test_writer_is_killed_while_a_reader_sweeps(folder: Path) -> None:
    """The reader deletes what an earlier writer has moved aside, and nothing of this one's."""
    num_calls = count_calls(folder / "whole", lambda x: x.save_best(2, a_state(2)))
    dies_at = call_that_leaves({"best", ".old-best"}, folder)
    last_calls = range(num_calls - 8, num_calls + 4)  # there is more to delete this time
    for reader_call, next_dies_at in itertools.product(range(1, 7), last_calls):
        site = Site(folder / f"{reader_call} {next_dies_at}")
        site.save_best(1, Calls())
        site.save_best(2, Calls(dies_at=dies_at))
        calls = itertools.count(1)

        def read_while_another_writes(takes_space: bool) -> None:
            if next(calls) == reader_call:  # noqa: B023
                site.save_best(3, Calls(dies_at=next_dies_at))  # noqa: B023

        with contextlib.suppress(CheckpointError):  # what it reads is replaced again and again
            site.checkpoints(read_while_another_writes).load_best()
        assert site.best_step() in (2, 3)


def test_first_writer_is_killed(folder: Path) -> None:
    """The folders that it made, the next one makes safe."""
    for dies_at, seed in itertools.product(range(1, 8), range(NUM_SEEDS)):
        site = Site(folder / f"{dies_at} {seed}")
        assert not site.save_best(1, Calls(dies_at=dies_at))
        assert site.save_best(1, Calls())
        site.lose_power(seed)
        assert site.best_step() == 1


def test_disk_is_full_at_any_call(folder: Path) -> None:
    """The one that was there is there, before anybody sweeps; or the new one."""
    num_calls = count_calls(folder / "whole", lambda x: x.save_best(2, a_state(2)))
    steps = []  # found after an error
    for full_at in range(1, num_calls + 1):
        site = Site(folder / str(full_at))
        site.save_best(1, Calls())
        checkpoints = site.checkpoints(Calls(full_at=full_at))
        if is_refused(lambda: checkpoints.save_best(2, a_state(2))):  # noqa: B023
            steps.append(read_best(checkpoints))
        else:
            assert read_best(checkpoints) == 2
        assert site.best_step() in (1, 2)
        assert [path.name for path in checkpoints.folder.iterdir()] == ["best"]
    assert steps == sorted(steps)
    assert steps.count(2) == 1  # its name could not be synced; all else was
    assert len(steps) > num_calls // 2  # the rest is what deletes


def test_old_checkpoint_that_cannot_be_deleted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no reason to end a training, and goes when there is space again."""
    num_calls = count_calls(folder / "whole", lambda x: x.save(2, a_state(2)))
    for full_at in range(1, num_calls + 1):
        caplog.clear()
        site = Site(folder / str(full_at))
        site.checkpoints(Calls()).save(1, a_state(1))
        checkpoints = site.checkpoints(Calls(full_at=full_at))
        is_saved = not is_refused(lambda: checkpoints.save(2, a_state(2)))  # noqa: B023
        if is_saved and checkpoints.saved_steps() == [2, 1]:
            break
    assert "step-00000001 could not be deleted ([Errno 28] No space left" in caplog.text
    checkpoints.save(3, a_state(3))
    assert checkpoints.saved_steps() == [3]
