"""What each worker runs: `fit` on a host of its own choice, with a note of each update."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import allstep
from allstep import Task, init
from allstep.comm.membership import Membership
from allstep.env import read_launch
from allstep.train.fit import fit_elastic
from tests.helpers import same_model
from tests.helpers.elastic_runs import OPTIONS
from tests.helpers.elastic_workers import hold_until
from tests.helpers.nemesis.hosts import Host

TIMEOUT_S = 4.0  # of a call, and for which the others wait
_START_S = 60.0  # of a call before all have met


class Notes:
    """Who has made which updates.

    Args:
        folder: of all workers of a run; not on its disk, which may be full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.goes_on = folder / "goes_on"

    def add(self, generation: int, names: Sequence[str], step: int) -> None:
        """This worker has made one."""
        line = f"{generation} {step} {','.join(names)}\n"
        with (self._folder / f"notes-{os.getpid()}").open("a") as file:
            file.write(line)
        (self._folder / f"step-{step}").touch()

    def has_step(self, step: int) -> bool:
        """Whether somebody has made that step's update."""
        return (self._folder / f"step-{step}").exists()

    @property
    def may_go_on(self) -> bool:
        """Whether workers are held no more."""
        return self.goes_on.exists()

    def let_go_on(self) -> None:
        """Holds them no more."""
        self.goes_on.touch()

    def check_one_group(self) -> None:
        """No two groups are the same generation, and none goes on where the next one does.

        Raises:
            AssertionError: else.
        """
        groups: dict[int, set[str]] = {}
        steps: dict[int, set[int]] = {}
        for file in self._folder.glob("notes-*"):
            for line in file.read_text().splitlines():
                generation, step, names = line.split()
                groups.setdefault(int(generation), set()).add(names)
                steps.setdefault(int(generation), set()).add(int(step))
        assert all(len(group) == 1 for group in groups.values()), f"two groups at once: {groups}"
        for earlier, later in itertools.pairwise(sorted(steps)):
            assert max(steps[earlier]) <= min(steps[later]), f"two groups go on: {steps}"


def train(host: Host, run_dir: Path, notes: Path, held_at: int) -> None:
    """Runs a worker.

    Args:
        host: where it lives.
        run_dir: on the disk.
        notes: the folder of `Notes`.
        held_at: before this step it waits for the file `goes_on` there.
    """
    host.enter()
    with init(device="cpu", timeout_s=_START_S) as comm:
        comm.set_timeout(TIMEOUT_S)
        membership = Membership(read_launch(), grace_s=TIMEOUT_S)
        task = _noting(same_model.make_task("sgd"), membership, Notes(notes), held_at)
        fit_elastic(task, OPTIONS, comm, run_dir, membership)


def _noting(task: Task, membership: Membership, notes: Notes, held_at: int) -> Task:
    """The task, with a note of each update, and held before one."""
    schedule, make_optimizer = task.schedule, task.optimizer
    current = [0]

    def stepwise(step: int) -> float:
        current[0] = step
        if step == held_at:
            hold_until(notes.goes_on)
        return schedule(step)

    def note(*_: Any) -> None:
        names = [member.name for member in membership.members]
        notes.add(membership.generation, names, current[0])

    def noted_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = make_optimizer(model)
        optimizer.register_step_post_hook(note)
        return optimizer

    return Task(**{**vars(task), "schedule": stepwise, "optimizer": noted_optimizer})


def undisturbed(run_dir: Path, *, resume: bool = False) -> None:
    """One worker that nobody disturbs, from the start or from the newest checkpoint."""
    comm = allstep.Communicator.single_process()
    how: Any = "auto" if resume else False
    allstep.fit(same_model.make_task("sgd"), OPTIONS, comm, run_dir, resume=how)
