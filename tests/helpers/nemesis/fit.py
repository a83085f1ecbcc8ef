"""The workload that `allstep train --elastic` runs: `fit`, with a note of each update."""

from pathlib import Path
from typing import Any

import torch

import allstep
from allstep import Communicator, Task
from allstep.comm.membership import Membership
from allstep.env import read_launch
from allstep.train.fit import fit_elastic
from tests.helpers import same_model
from tests.helpers.elastic_runs import OPTIONS, check_same
from tests.helpers.elastic_workers import hold_until
from tests.helpers.nemesis.workload import TIMEOUT_S, Notes


class Fit:
    """See `Workload`."""

    name = "fit"
    rejoins = True

    def train(self, comm: Communicator, run_dir: Path, notes: Notes, held_at: int) -> None:
        membership = Membership(read_launch(), grace_s=TIMEOUT_S)
        task = _noting(same_model.make_task("sgd"), membership, notes, held_at)
        fit_elastic(task, OPTIONS, comm, run_dir, membership)

    def undisturbed(self, run_dir: Path) -> None:
        comm = Communicator.single_process()
        how: Any = "auto" if run_dir.exists() else False
        allstep.fit(same_model.make_task("sgd"), OPTIONS, comm, run_dir, resume=how)

    def check(self, run_dir: Path, undisturbed: Path, notes: Path, *, was_resumed: bool) -> None:
        check_same(run_dir, undisturbed, was_resumed=was_resumed)


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
