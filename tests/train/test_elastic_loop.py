"""A user's own loop whose workers are killed at any call, and joined: the same bits."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, Synchronous, UsageError, init
from allstep.env import read_launch
from allstep.train import elastic_loop
from tests.helpers import same_model
from tests.helpers.compare import differing_names
from tests.helpers.joiners import num_joiners
from tests.helpers.processes import Workers
from tests.train.test_elastic import Calls, Moment, ended, wait_until

NUM_EPOCHS = 3
NUM_STEPS = 4 * NUM_EPOCHS
NUM_CALLS = 24_000  # of functions of allstep, in a run, on each of four workers, about
NUM_SEEDS = int(os.environ.get("SEEDS", "12"))  # `make nemesis` sets another
_NUM_FIRST_CALLS = 1_500  # until all have met for the first time


class Numbered(same_model.Images):
    """With the number of each sample."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), index)


class Loop:
    """A user's own loop, with batch norm, dropout, momentum and a schedule.

    Args:
        comm: the workers.
        seen: where each worker writes which samples it had in each step; None for nowhere.
        before: called with the place and the step, at each place of the user's code.
        kind: of `Elastic`.
    """

    def __init__(
        self,
        comm: Communicator,
        seen: Path | None = None,
        before: Callable[[str, int], None] = lambda place, step: None,
        kind: type[allstep.Elastic] = allstep.Elastic,
    ) -> None:
        task = same_model.make_task("sgd")
        self.comm, self.model, self._before = comm, task.model, before
        self.optimizer = task.optimizer(self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.exchange = allstep.attach(self.model, comm, Synchronous(compression="exact"))
        self.loader = allstep.data.loader(
            Numbered(),
            comm,
            global_batch=same_model.GLOBAL_BATCH,
            micro_batch=same_model.MICRO_BATCH,
            seed=11,
        )
        state = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        self.elastic = kind(self.loader, self.exchange, state=state)
        self.losses: dict[int, float] = {}
        self.attempts: dict[int, int] = {}
        self._seen = seen

    def run(self, num_epochs: int = NUM_EPOCHS) -> dict[str, Tensor]:
        """Trains; returns all that has come of it."""
        with self.elastic as elastic:
            for _ in elastic.epochs(num_epochs):
                for batch in allstep.steps(self.loader, self.exchange, elastic=elastic):
                    self._step(batch)
                self._before("epoch", self.loader.step)
                self.scheduler.step()
        return self.result()

    def _step(self, batch: allstep.train.Batch) -> None:
        self._before("batch", batch.step)
        numbers: list[int] = []
        attempt = 0
        for x, y, number in batch:
            if batch.attempt > attempt:
                attempt, numbers = batch.attempt, []
            numbers += number.tolist()
            self._before("forward", batch.step)
            batch.backward(same_model.loss_of(self.model, (x, y)))
            self._before("backward", batch.step)
        if batch.attempt > attempt:  # without a micro-batch in the last attempt
            numbers = []
        if self._seen is not None:
            with self._seen.open("a") as file:
                file.write(json.dumps([batch.step, numbers]) + "\n")
        self._before("update", batch.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[batch.step], self.attempts[batch.step] = batch.global_loss(), batch.attempt

    def result(self) -> dict[str, Tensor]:
        momenta = self.optimizer.state_dict()["state"]
        return {
            **self.model.state_dict(),
            **{f"momentum {n}": own["momentum_buffer"] for n, own in momenta.items()},
            "rate": torch.tensor(self.scheduler.get_last_lr(), dtype=torch.float64),
            **{f"loss {n}": torch.tensor(x, dtype=torch.float64) for n, x in self.losses.items()},
        }


class Ends:
    """Kills a rank at a place of its own code, in one step; the n-th time that it comes there."""

    def __init__(self, place: str, step: int, count: int = 1) -> None:
        self._where, self._left = (place, step), count

    def __call__(self, place: str, step: int) -> None:
        self._left -= (place, step) == self._where
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path,
    dies_at: Mapping[int, Moment],
    befores: Mapping[int, Callable[[str, int], None]],
    kind: type[allstep.Elastic] = allstep.Elastic,
) -> tuple[dict[str, Tensor], dict[int, int], int]:
    """What each worker runs: what came of it, attempts by step, and how many calls it made."""
    rank = read_launch().rank
    with init(device="cpu", timeout_s=30.0) as comm:
        calls = Calls(dies_at.get(rank))
        try:
            place = folder / f"seen-{os.getpid()}"
            loop = Loop(comm, place, befores.get(rank, lambda place, step: None), kind)
            return loop.run(), loop.attempts, calls.count
        finally:
            sys.setprofile(None)


def train_alone() -> dict[str, Tensor]:
    """One worker, with the plain `steps`."""
    loop = Loop(Communicator.single_process())
    for _ in range(NUM_EPOCHS):
        for batch in allstep.steps(loop.loader, loop.exchange):
            loop._step(batch)
        loop.scheduler.step()
    return loop.result()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    return train_alone()


def samples_by_step(folder: Path) -> dict[int, list[int]]:
    """As all workers have written them, those that were killed, too."""
    found: dict[int, list[int]] = {step: [] for step in range(NUM_STEPS)}
    for file in folder.glob("seen-*"):
        for line in file.read_text().splitlines():
            step, numbers = json.loads(line)
            found[step] += numbers
    return found


def check_seen_once(folder: Path) -> None:
    by_step = samples_by_step(folder)
    for epoch in range(NUM_EPOCHS):
        steps = range(4 * epoch, 4 * epoch + 4)
        numbers = sorted(number for step in steps for number in by_step[step])
        assert numbers == list(range(same_model.NUM_SAMPLES)), epoch


def check_same(outcome: Any, undisturbed: dict[str, Tensor]) -> None:
    result = outcome.value[0]
    own = {name: value for name, value in undisturbed.items() if name in result}
    assert own.keys() | {"loss 0"} >= {n for n in undisturbed if not n.startswith("loss")}
    assert differing_names(result, own) == []


def test_alone(undisturbed: dict[str, Tensor]) -> None:
    """A lone process needs no launcher."""
    assert differing_names(Loop(Communicator.single_process()).run(), undisturbed) == []


MOMENTS: dict[str, tuple[Mapping[int, Moment], Mapping[int, Any]]] = {
    "nobody": ({}, {}),
    "forward": ({}, {1: Ends("forward", 5, 2)}),
    "after the exchange of one": ({}, {1: Ends("backward", 5, 3)}),
    "exchange of gradients": ({1: ("_send_next", 9)}, {}),
    "sums of batch norm": ({2: ("_take_in_sums", 7)}, {}),
    "last message": ({0: ("commit", 13)}, {}),
    "update": ({}, {0: Ends("update", 6)}),
    "after the update": ({}, {2: Ends("batch", 6)}),
    "end of an epoch": ({}, {0: Ends("epoch", 8)}),
    "the last update": ({}, {3: Ends("update", NUM_STEPS - 1)}),
    "two at once": ({1: ("_take_in_sums", 7)}, {3: Ends("forward", 6, 1)}),
    "meeting again": ({1: ("meet", 1)}, {0: Ends("update", 6)}),
    "beginning again": ({3: ("_take_up_workers", 20)}, {0: Ends("update", 6)}),
}
QUICK = ("forward", "last message", "update", "meeting again")


@pytest.mark.process
@pytest.mark.parametrize(
    "moment", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS]
)
def test_killed_in(moment: str, tmp_path: Path, undisturbed: dict[str, Tensor]) -> None:
    dies_at, befores = MOMENTS[moment]
    with Workers(4, train, (tmp_path, dies_at, befores), min_workers=1) as workers:
        codes, outcomes = ended(workers), workers.outcomes()
    victims = dies_at.keys() | befores.keys()
    assert codes == [-signal.SIGKILL if rank in victims else 0 for rank in range(4)], outcomes
    for rank in set(range(4)) - victims:
        check_same(outcomes[rank], undisturbed)
    check_seen_once(tmp_path)
    print(moment, [outcomes[rank].value[1:] for rank in set(range(4)) - victims])
