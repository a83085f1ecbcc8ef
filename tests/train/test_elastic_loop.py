"""A user's own loop whose workers are killed at any call, and joined: the same bits."""

import contextlib
import json
import os
import pickle
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import allstep
from allstep import Communicator, Synchronous, UsageError, init
from allstep.cli.exits import StoreAddress
from allstep.comm import WELL, Work, read_states
from allstep.comm.membership import Membership
from allstep.comm.reproducible import digits_of
from allstep.data import GlobalBatch
from allstep.env import read_launch
from allstep.errors import PeerLostError
from allstep.nn import convert_batch_norm
from allstep.train.elastic import StepCommit
from tests.helpers import same_model
from tests.helpers.compare import differing_names
from tests.helpers.elastic_workers import (
    TOO_LATE,
    Calls,
    Moment,
    ended,
    hold_until,
    is_held,
    wait_until,
)
from tests.helpers.joiners import ask_and_end, ask_to_stop, has_generation, num_joiners
from tests.helpers.processes import Workers
from tests.helpers.ranks import run_ranks

NUM_EPOCHS = 3
NUM_STEPS = 4 * NUM_EPOCHS
NUM_CALLS = 24_000  # of functions of allstep, in a run, on each of four workers, about
NUM_SEEDS = int(os.environ.get("SEEDS", "4"))  # `make kill-anywhere` sets more
_NUM_FIRST_CALLS = 3_000  # until all have met for the first time, in 2,750


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
        every: global batches to an update.
        loader_workers: processes of each worker's loader.
        samples: others than all other workers have.
        trained_from: the epoch from which the first layer is trained.
    """

    def __init__(
        self,
        comm: Communicator,
        seen: Path | None = None,
        before: Callable[[str, int], None] = lambda place, step: None,
        kind: type[allstep.Elastic] = allstep.Elastic,
        every: int = 1,
        loader_workers: int = 0,
        samples: Numbered | None = None,
        trained_from: int = 0,
    ) -> None:
        self._every, self._trained_from = every, trained_from
        task = same_model.make_task("sgd")
        self.comm, self.model, self._before = comm, task.model, before
        self.freeze(0)
        self.optimizer = task.optimizer(self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.exchange = allstep.attach(self.model, comm, Synchronous(compression="exact"))
        self.loader = allstep.data.loader(
            samples or Numbered(),
            comm,
            global_batch=same_model.GLOBAL_BATCH,
            micro_batch=same_model.MICRO_BATCH,
            seed=11,
            num_workers=loader_workers,
        )
        state = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        self.elastic = kind(self.loader, self.exchange, state=state)
        self.losses: dict[int, float] = {}
        self.evaluations: list[dict[str, float]] = []
        self.drawn: list[float] = []  # random numbers, for an epoch and in what is called behind it
        self.attempts: dict[int, int] = {}
        self._seen = seen

    def run(self, num_epochs: int = NUM_EPOCHS) -> dict[str, Tensor]:
        """Trains; returns all that has come of it."""
        with self.loader, self.elastic as elastic:
            for epoch in elastic.epochs(num_epochs):
                self.freeze(epoch)
                self.drawn.append(random.random())
                for batch in allstep.steps(self.loader, self.exchange, elastic=elastic):
                    self._step(batch)
                self.evaluations.append(elastic.call(self._evaluate))
                self.drawn.append(self.evaluations[-1]["drawn"])
                self._before("epoch", self.loader.step)
                self.scheduler.step()
        return self.result()

    def freeze(self, epoch: int) -> None:
        """The first layer, for as long as it is not trained."""
        for p in next(p for m in self.model.modules() if (p := list(m.parameters(recurse=False)))):
            p.requires_grad_(epoch >= self._trained_from)

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
        if batch.step % self._every == self._every - 1:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses[batch.step], self.attempts[batch.step] = batch.global_loss(), batch.attempt
        self._before("behind the update", batch.step)

    def _evaluate(self) -> dict[str, float]:
        self._before("evaluation", self.loader.step)
        task, size = same_model.make_task("sgd"), same_model.MICRO_BATCH
        evaluator = allstep.Evaluator(task.metrics, task.test_set, self.comm, micro_batch=size)
        return {"drawn": random.random(), **evaluator(self.model)}

    def result(self) -> dict[str, Tensor]:
        momenta = self.optimizer.state_dict()["state"]
        return {
            **self.model.state_dict(),
            **{f"momentum {n}": own["momentum_buffer"] for n, own in momenta.items()},
            "rate": torch.tensor(self.scheduler.get_last_lr(), dtype=torch.float64),
            "evaluations": torch.tensor([x["accuracy"] for x in self.evaluations[-1:]]),
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
    options: Mapping[str, int] = MappingProxyType({}),
) -> tuple[dict[str, Tensor], dict[int, int], int, list[float]]:
    """What each worker runs.

    Returns:
        What came of it, attempts by step, how many calls it made, and what it has drawn.
    """
    rank = read_launch().rank
    with init(device="cpu", timeout_s=30.0, run_dir=folder) as comm:
        calls = Calls(dies_at.get(rank))
        try:
            place = folder / f"seen-{os.getpid()}"
            loop = Loop(comm, place, befores.get(rank, lambda place, step: None), kind, **options)
            return loop.run(), loop.attempts, calls.count, loop.drawn
        finally:
            sys.setprofile(None)


def train_alone(every: int = 1) -> dict[str, Tensor]:
    """One worker, with the plain `steps`."""
    loop = Loop(Communicator.single_process(), every=every)
    for _ in range(NUM_EPOCHS):
        for batch in allstep.steps(loop.loader, loop.exchange):
            loop._step(batch)
        loop.evaluations.append(loop._evaluate())
        loop.scheduler.step()
    return loop.result()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    return train_alone()


@pytest.fixture(scope="module")
def drawn() -> list[float]:
    """By a lone worker."""
    loop = Loop(Communicator.single_process())
    loop.run()
    assert len(set(loop.drawn)) == 2 * NUM_EPOCHS
    return loop.drawn


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
    "sums of batch norm": ({2: ("_sum_micro_batches", 7)}, {}),
    "last message": ({0: ("commit", 13)}, {}),
    "update": ({}, {0: Ends("update", 6)}),
    "after the update": ({}, {2: Ends("batch", 6)}),
    "evaluation": ({}, {1: Ends("evaluation", 8)}),
    "counts of an evaluation": ({2: ("_agreed_names", 2)}, {}),
    "end of an epoch": ({}, {0: Ends("epoch", 8)}),
    "the last update": ({}, {3: Ends("update", NUM_STEPS - 1)}),
    "two at once": ({1: ("_sum_micro_batches", 7)}, {3: Ends("forward", 6, 1)}),
    "meeting again": ({1: ("meet", 1)}, {0: Ends("update", 6)}),
    "beginning again": ({3: ("begin_again", 2)}, {0: Ends("update", 6)}),
}
QUICK = ("forward", "last message", "update", "evaluation", "meeting again")


@pytest.mark.process
@pytest.mark.parametrize(
    "moment", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS]
)
def test_killed_in(
    moment: str, tmp_path: Path, undisturbed: dict[str, Tensor], drawn: list[float]
) -> None:
    dies_at, befores = MOMENTS[moment]
    with Workers(4, train, (tmp_path, dies_at, befores), min_workers=1) as workers:
        codes, outcomes = ended(workers), workers.outcomes()
    victims = dies_at.keys() | befores.keys()
    assert codes == [-signal.SIGKILL if rank in victims else 0 for rank in range(4)], outcomes
    for rank in set(range(4)) - victims:
        check_same(outcomes[rank], undisturbed)
        assert outcomes[rank].value[3] == drawn
    check_seen_once(tmp_path)


@pytest.mark.process
@pytest.mark.slow
def test_processes_of_a_loader(tmp_path: Path, undisturbed: dict[str, Tensor]) -> None:
    """What they have read ahead is read anew."""
    arguments = (tmp_path, {}, {1: Ends("forward", 5, 2)}, allstep.Elastic, {"loader_workers": 1})
    with Workers(3, train, arguments, min_workers=1) as workers:
        assert ended(workers) == [0, -signal.SIGKILL, 0], workers.outcomes()
        check_same(workers.outcomes()[0], undisturbed)
    check_seen_once(tmp_path)


@pytest.mark.process
@pytest.mark.slow
def test_gradients_of_several_batches(tmp_path: Path) -> None:
    """Two to an update: another joins between them, and a worker is lost in the second one."""
    goes_on = tmp_path / "goes_on"
    options = {"every": 2}
    befores = {0: HeldAt("batch", 4, goes_on), 1: Ends("forward", 5)}
    with contextlib.ExitStack() as stack:
        arguments = (tmp_path, {}, befores, allstep.Elastic, options)
        later = partial(train, tmp_path, {}, {}, allstep.Elastic, options)
        workers, joiner = joined(stack, 2, arguments, later, goes_on)
        assert ended(workers) == [0, -signal.SIGKILL], workers.outcomes()
        assert ended(joiner) == [0], joiner.outcomes()
        outcomes = [workers.outcomes()[0], joiner.outcomes()[0]]
    assert min(outcomes[1].value[1]) == 5  # its first step
    for outcome in outcomes:
        check_same(outcome, train_alone(every=2))
    check_seen_once(tmp_path)


def train_two_models(dies: bool) -> tuple[list[Tensor], int]:
    """In the way of a GAN: two losses of each micro-batch, one update of each model."""
    with init(device="cpu", timeout_s=30.0) as comm:
        torch.manual_seed(3)
        models = [nn.Linear(2, 2), nn.Linear(2, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        policy = Synchronous(compression="exact")
        exchanges = [allstep.attach(model, comm, policy) for model in models]
        samples = TensorDataset(torch.randn(48, 2))
        loader = allstep.data.loader(samples, comm, global_batch=12, micro_batch=2)
        attempts = 0
        state = {"first": optimizers[0], "second": optimizers[1]}
        with allstep.Elastic(loader, *exchanges, state=state) as elastic:
            for _ in elastic.epochs(2):
                for batch in allstep.steps(loader, *exchanges, elastic=elastic):
                    for (x,) in batch:
                        if dies and read_launch().rank == 1 and batch.step == 5:
                            os.kill(os.getpid(), signal.SIGKILL)
                        batch.backward(models[1](models[0](x).detach()).square().mean())
                        batch.backward(-models[1](models[0](x)).mean())
                    attempts += batch.attempt
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
        return [p.detach() for model in models for p in model.parameters()], attempts


@pytest.mark.process
@pytest.mark.slow
def test_several_exchanges() -> None:
    found = []
    for dies in (False, True):
        with Workers(3, train_two_models, (dies,), min_workers=1) as workers:
            assert ended(workers) == [0, -signal.SIGKILL * dies, 0], workers.outcomes()
            found.append(workers.outcomes()[0].value)
    assert [attempts for _, attempts in found] == [0, 1]
    for undisturbed, own in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(undisturbed, own)


def be_left_behind() -> None:
    """Rank 1 comes when rank 0 has gone on without it."""
    launch = read_launch()
    with init(device="cpu", timeout_s=30.0) as comm:
        membership = Membership(launch, grace_s=0.1, rejoins=False)
        membership.begin(comm)
        comm.barrier()
        if comm.rank == 1:
            assert launch.master_port is not None
            store = StoreAddress("127.0.0.1", launch.master_port, launch.job_id)
            while not has_generation(store, 1):
                time.sleep(0.01)
        membership.next(3)
        membership.end()
        comm.abort()


@pytest.mark.process
def test_a_worker_that_is_left_behind() -> None:
    """It was in the midst of the user's code, and can't join there."""
    with Workers(2, be_left_behind, (), min_workers=1) as workers:
        assert ended(workers) == [0, 1]
        assert "gone on without this worker" in workers.outcomes()[1].value


class UpdatesAnyway(allstep.Elastic):
    """Makes the update with what it has of a step in which a worker was lost."""

    def lose_workers(self) -> Tensor | None:
        super().lose_workers()
        return digits_of(torch.zeros(3))


class LeavesBuffers(allstep.Elastic):
    """Runs a step again with what the first attempt has made of the model's buffers."""

    def begin_pass(self) -> GlobalBatch | None:
        first = [value.clone() for value in self._exchanges[0].model.buffers()]
        cut = super().begin_pass()
        for buffer, value in zip(self._exchanges[0].model.buffers(), first, strict=True):
            buffer.copy_(value)
        return cut


@pytest.mark.process
@pytest.mark.parametrize("kind", [UpdatesAnyway, LeavesBuffers])
def test_control(
    kind: type[allstep.Elastic], tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    """What a loop would come to that is not run again as a whole: other bits."""
    dies_at = {0: ("commit", 13)}
    with Workers(2, train, (tmp_path, dies_at, {}, kind), min_workers=1) as workers:
        assert ended(workers) == [-signal.SIGKILL, 0], workers.outcomes()
        result = workers.outcomes()[1].value[0]
    assert differing_names(result, {n: undisturbed[n] for n in result}) != []


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_killed_at_any_call(seed: int, tmp_path: Path, undisturbed: dict[str, Tensor]) -> None:
    draw = random.Random(seed)
    victims = draw.sample(range(4), draw.choice((1, 2, 3)))
    dies_at = {rank: draw.randrange(_NUM_FIRST_CALLS, NUM_CALLS) for rank in victims}
    with Workers(4, train, (tmp_path, dies_at, {}), min_workers=1) as workers:
        codes, outcomes = ended(workers), workers.outcomes()
    assert set(codes) <= {0, -signal.SIGKILL}, outcomes
    assert [codes[rank] for rank in range(4) if rank not in victims] == [0] * (4 - len(victims))
    for rank, code in enumerate(codes):
        if code == 0:
            check_same(outcomes[rank], undisturbed)


def train_with_a_lost_answer(folder: Path, step: int) -> Any:
    """On rank 1 the last message of a step is lost, which the others have got."""
    commit, rank = StepCommit.commit, read_launch().rank
    num_left = step + 1

    def losing(self: StepCommit, sums: Tensor) -> Work[Tensor]:
        nonlocal num_left
        work, num_left = commit(self, sums), num_left - 1
        if rank == 1 and num_left == 0:
            work.wait()
            raise PeerLostError("the connection was closed")
        return work

    StepCommit.commit = losing  # type: ignore[method-assign]
    return train(folder, {}, {})


@pytest.mark.process
@pytest.mark.parametrize("step", [6, pytest.param(NUM_STEPS - 1, marks=pytest.mark.slow)])
def test_one_has_missed_the_last_message(
    step: int, tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    """It makes its update, with the loss that the others have, and runs nothing again."""
    arguments = (tmp_path, step)
    with Workers(3, train_with_a_lost_answer, arguments, min_workers=1) as workers:
        assert ended(workers) == [0, 0, 0], workers.outcomes()
        outcomes = workers.outcomes()
    for rank in range(3):
        check_same(outcomes[rank], undisturbed)
        assert outcomes[rank].value[1][step] == 0
    check_seen_once(tmp_path)


def train_with_a_lost_end_of_a_call(folder: Path) -> Any:
    """On rank 1 the last message of the second evaluation is lost, which the others have got."""
    with init(device="cpu", timeout_s=30.0) as comm:
        places: list[str] = []
        loop = Loop(comm, folder / f"seen-{comm.rank}", lambda place, step: places.append(place))
        barrier, rank, num_left = comm.barrier, comm.rank, 2

        def losing() -> None:
            nonlocal num_left
            barrier()
            num_left -= 1
            if rank == 1 and num_left == 0:
                raise PeerLostError("the connection was closed")

        comm.barrier = losing  # type: ignore[method-assign]
        return loop.run(), places.count("evaluation"), loop.evaluations


@pytest.mark.process
def test_one_has_missed_the_end_of_a_call(tmp_path: Path, undisturbed: dict[str, Tensor]) -> None:
    """It gets from the others what has come of it."""
    with Workers(3, train_with_a_lost_end_of_a_call, (tmp_path,), min_workers=1) as workers:
        assert ended(workers) == [0, 0, 0], workers.outcomes()
        outcomes = workers.outcomes()
    for rank in range(3):
        check_same(outcomes[rank], undisturbed)
        assert outcomes[rank].value[1] == NUM_EPOCHS
        assert outcomes[rank].value[2] == outcomes[0].value[2]


class HeldAt:
    """Holds a worker at a place of its own code until a file is there, and may kill it then."""

    def __init__(self, place: str, step: int, file: Path, *, dies: bool = False) -> None:
        self._where, self._file, self._dies = (place, step), file, dies

    def __call__(self, place: str, step: int) -> None:
        if (place, step) != self._where:
            return
        hold_until(self._file)
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)


def started(
    stack: contextlib.ExitStack,
    fn: Callable[..., Any],
    num_workers: int,
    arguments: tuple[Any, ...],
    **options: Any,
) -> Workers:
    """Workers that may be lost, until the stack ends."""
    return stack.enter_context(Workers(num_workers, fn, arguments, min_workers=1, **options))


def joined(
    stack: contextlib.ExitStack,
    num_workers: int,
    arguments: tuple[Any, ...],
    joins: Callable[[], Any],
    goes_on: Path,
) -> tuple[Workers, Workers]:
    """Workers that train until one is held, and one that has asked to join them as they go on."""
    workers = started(stack, train, num_workers, arguments)
    wait_until(lambda: is_held(goes_on), workers)
    joiner = started(stack, joins, 1, (), joins=workers.store_address)
    wait_until(lambda: num_joiners(workers.store_address) == 1, workers)
    goes_on.touch()
    return workers, joiner


@pytest.mark.process
@pytest.mark.parametrize(
    ("place", "dies"),
    [
        ("batch", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("epoch", None),
                ("forward", None),
                ("batch", "veteran"),
                ("batch", "giver"),
                ("batch", "taker"),
                ("batch", "one that waits for the giver"),
            )
        ),
    ],
)
def test_joining(
    place: str,
    dies: str | None,
    tmp_path: Path,
    undisturbed: dict[str, Tensor],
    drawn: list[float],
) -> None:
    """Two join two, after the step at one of whose places these are held."""
    goes_on = tmp_path / "goes_on"
    victims: dict[str | None, tuple[int, Moment]] = {
        "giver": (0, ("send_state", 1)),
        "one that waits for the giver": (1, ("receive_state", 1)),
    }
    dies_at = dict([victims[dies]]) if dies in victims else {}
    befores = {
        rank: HeldAt(place, 4, goes_on, dies=(dies, rank) == ("veteran", 1)) for rank in (0, 1)
    }
    later = tmp_path, {0: ("receive_state", 1)} if dies == "taker" else {}, {}
    with contextlib.ExitStack() as stack:
        start = partial(started, stack, train)
        workers = start(2, (tmp_path, dies_at, befores))
        wait_until(lambda: is_held(goes_on), workers)
        first = start(1, later, joins=workers.store_address)
        second = start(1, (tmp_path, {}, {}), joins=workers.store_address)
        wait_until(lambda: num_joiners(workers.store_address) == 2, workers)
        goes_on.touch()
        groups = [workers, first, second]
        codes = [code for group in groups for code in ended(group)]
        outcomes = [
            group.outcomes()[rank]
            for group, rank in zip([workers, *groups], (0, 1, 0, 0), strict=True)
        ]
    assert codes.count(-signal.SIGKILL) == (dies is not None), outcomes
    for code, outcome in zip(codes, outcomes, strict=True):
        assert code in (0, -signal.SIGKILL), outcome.value
        if code == 0:
            check_same(outcome, undisturbed)
            own = outcome.value[3]  # of who joins, from the present epoch on
            assert own == drawn[-len(own) :]
    joined = [
        outcome.value[1] for code, outcome in zip(codes[2:], outcomes[2:], strict=True) if code == 0
    ]
    assert all(5 <= min(attempts) <= 6 for attempts in joined), joined  # they have trained
    check_seen_once(tmp_path)
    left = [(state.rank, state.size, state.end) for state in read_states(tmp_path)]
    assert left == [(rank, codes.count(0), WELL) for rank in range(codes.count(0))]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_killed_and_joined_at_any_call(
    seed: int, tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    """Two join while the others run, whenever they have started; any but one of all may die."""
    draw = random.Random(seed)
    victims = draw.sample(range(5), draw.choice((1, 2, 3, 4)))
    moments: dict[int, Moment] = {
        worker: draw.randrange(_NUM_FIRST_CALLS, NUM_CALLS) for worker in victims
    }
    goes_on = tmp_path / "goes_on"
    place, step = draw.choice(("batch", "forward", "update")), draw.randrange(1, 9)
    befores = {rank: HeldAt(place, step, goes_on) for rank in range(3)}
    first = {rank: moment for rank, moment in moments.items() if rank < 3}
    arguments = [(tmp_path, {0: moments[n]} if n in moments else {}, {}) for n in (3, 4)]
    with contextlib.ExitStack() as stack:
        start = partial(started, stack, train)
        workers = start(3, (tmp_path, first, befores))
        wait_until(lambda: bool(samples_by_step(tmp_path)[step - 1]) or workers.wait(0), workers)
        one, other = (start(1, given, joins=workers.store_address) for given in arguments)
        wait_until(lambda: num_joiners(workers.store_address) >= 1 or workers.wait(0), workers)
        goes_on.touch()
        groups = (workers, one, other)
        codes = [code for group in groups for code in ended(group)]
        outcomes = [group.outcomes() for group in groups]
    found = [outcome for by_rank in outcomes for _, outcome in sorted(by_rank.items())]
    for worker, (code, outcome) in enumerate(zip(codes, found, strict=True)):
        came_too_late = worker > 2 and code == 1 and TOO_LATE.search(str(outcomes)) is not None
        assert code in (0, -signal.SIGKILL) or came_too_late, outcomes
        assert worker in victims or code != -signal.SIGKILL, outcomes
        if code == 0:
            check_same(outcome, undisturbed)


@pytest.mark.process
def test_fewer_than_min_workers(tmp_path: Path) -> None:
    arguments = (tmp_path, {}, {0: Ends("forward", 5)})
    with Workers(2, train, arguments, min_workers=2) as workers:
        assert ended(workers) == [-signal.SIGKILL, 1]
        assert "1 workers are left, fewer than `min_workers` (=2)" in workers.outcomes()[1].value


@pytest.mark.process
def test_an_exception_in_one_workers_code(tmp_path: Path, undisturbed: dict[str, Tensor]) -> None:
    """It is lost as if it had been killed."""
    arguments = (tmp_path, {}, {1: raise_at_five})
    with Workers(2, train, arguments, min_workers=1) as workers:
        assert ended(workers) == [0, 1]
        check_same(workers.outcomes()[0], undisturbed)
        assert "out of luck" in workers.outcomes()[1].value


def raise_at_five(place: str, step: int) -> None:
    if (place, step) == ("forward", 5):
        raise RuntimeError("out of luck")


def test_going_on_from_a_file(tmp_path: Path, undisturbed: dict[str, Tensor]) -> None:
    """After the launcher was killed, say."""
    loop = Loop(Communicator.single_process())
    loop.run(2)
    torch.save(loop.elastic.state_dict(), tmp_path / "state.pt")
    resumed = Loop(Communicator.single_process())
    resumed.elastic.load_state_dict(torch.load(tmp_path / "state.pt"))
    result = resumed.run()
    assert list(resumed.losses) == list(range(8, NUM_STEPS))
    assert differing_names(result, {n: undisturbed[n] for n in result}) == []
    with pytest.raises(UsageError, match="`load_state_dict` comes before `with`"):
        resumed.elastic.load_state_dict({})


def test_gradients_of_before_do_not_stay() -> None:
    """A state that has none is loaded over some that wait for an update."""
    loop = Loop(Communicator.single_process())
    state = pickle.loads(pickle.dumps(loop.elastic.state_dict()))
    for p in loop.model.parameters():
        p.grad = torch.ones_like(p)
    loop.elastic.load_state_dict(state)
    assert all(p.grad is None for p in loop.model.parameters())


class StoppedError(Exception):
    """In place of a process's end."""


@pytest.mark.parametrize("step", [5, 7])  # in an epoch, and its last
@pytest.mark.parametrize("place", ["in the update", "behind the update"])
def test_going_on_from_a_file_of_a_step(
    place: str, step: int, undisturbed: dict[str, Tensor], drawn: list[float]
) -> None:
    """Gradients that were used don't count again; what follows `steps` in the epoch is run."""
    states: list[dict[str, Any]] = []

    def keep(*_: Any) -> None:
        states.append(pickle.loads(pickle.dumps(loop.elastic.state_dict())))

    def keep_and_stop(at: str, number: int) -> None:
        if at == "behind the update":
            if place == at:
                keep()
            if number == step:
                raise StoppedError

    loop = Loop(Communicator.single_process(), before=keep_and_stop)
    if place == "in the update":  # before `zero_grad`
        loop.optimizer.register_step_post_hook(keep)
    with pytest.raises(StoppedError):
        loop.run()
    resumed = Loop(Communicator.single_process())
    resumed.elastic.load_state_dict(states[-1])
    result = resumed.run()
    assert list(resumed.losses) == list(range(step + 1, NUM_STEPS))
    assert differing_names(result, {n: undisturbed[n] for n in result}) == []
    assert resumed.drawn == drawn[-len(resumed.drawn) :]
    assert len(resumed.evaluations) == 2


def test_gradients_of_a_file_are_in_the_next_one() -> None:
    """No step is made between the two, the second of which is of the end of an epoch."""
    states: list[dict[str, Any]] = []

    def keep(at: str, step: int) -> None:
        if (at, step) in (("behind the update", 3), ("epoch", 4)):
            if at == "epoch":
                loop.scheduler.step()
            states.append(pickle.loads(pickle.dumps(loop.elastic.state_dict())))
            raise StoppedError

    for _ in range(2):
        loop = Loop(Communicator.single_process(), before=keep, every=3)
        if states:
            loop.elastic.load_state_dict(states[-1])
        with pytest.raises(StoppedError):
            loop.run()
    resumed = Loop(Communicator.single_process(), every=3)
    resumed.elastic.load_state_dict(states[-1])
    result, expected = resumed.run(), Loop(Communicator.single_process(), every=3).run()
    assert list(resumed.losses) == list(range(4, NUM_STEPS))
    assert differing_names(result, {n: expected[n] for n in result}) == []


def test_going_on_from_a_file_of_the_end() -> None:
    """What is called behind all epochs can be had again."""
    loop = Loop(Communicator.single_process())
    loop.run()
    resumed = Loop(Communicator.single_process())
    resumed.elastic.load_state_dict(loop.elastic.state_dict())
    with resumed.elastic as elastic:
        assert list(elastic.epochs(NUM_EPOCHS)) == []
        assert elastic.call(resumed._evaluate)["accuracy"] == loop.evaluations[-1]["accuracy"]


def lone(policy: allstep.ExchangePolicy | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """A loader, an exchange, and the state."""
    comm = Communicator.single_process()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = allstep.attach(
        model, comm, policy or Synchronous(compression="exact"), optimizer=optimizer
    )
    samples = options.pop("samples", None) or TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    arguments = {"global_batch": 4, "micro_batch": 2, **options}
    loader = allstep.data.loader(samples, comm, **arguments)
    return loader, exchange, {"optimizer": optimizer}


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.ones(8, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": Synchronous()}, "compression='fp32'"),
        ({"policy": allstep.Stale(steps=1, compression="exact")}, "the policy Stale"),
        ({"policy": allstep.LocalSGD(sync_every=4, compression="exact")}, "the policy LocalSGD"),
        ({"shares": [1.0]}, "`shares` (=[1.0])"),
        ({"samples": Stream()}, "`loader` is of a stream"),
    ],
)
def test_what_cannot_be_elastic(options: dict[str, Any], words: str) -> None:
    loader, exchange, state = lone(**options)
    with pytest.raises(UsageError, match=re.escape(words)):
        allstep.Elastic(loader, exchange, state=state)


def test_batch_norm_that_talks_to_others() -> None:
    def worker(comm: Communicator) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model = convert_batch_norm(model, comm, 4, micro_batch=2, global_batch=4)
        exchange = allstep.attach(model, comm, Synchronous(compression="exact"))
        samples = TensorDataset(torch.ones(8, 2))
        loader = allstep.data.loader(samples, comm, global_batch=4, micro_batch=2)
        with pytest.raises(UsageError) as error:
            allstep.Elastic(loader, exchange, state={})
        return str(error.value)

    assert "talks to them in the forward pass" in run_ranks(2, worker)[0]


def test_what_is_used_in_another_way() -> None:
    loader, exchange, state = lone()
    elastic = allstep.Elastic(loader, exchange, state={})
    with pytest.raises(UsageError, match="`epochs` is for"):
        elastic.epochs(1)
    with pytest.raises(UsageError, match="put `steps` in"):
        next(iter(allstep.steps(loader, exchange, elastic=elastic)))
    with pytest.raises(UsageError, match="without `replay`"):
        allstep.steps(loader, exchange, elastic=elastic, replay=True)
    with elastic:
        for _ in elastic.epochs(1):
            with pytest.raises(UsageError, match="`elastic` was made for another loader"):
                next(iter(allstep.steps(lone()[0], exchange, elastic=elastic)))
            with pytest.raises(UsageError, match="`call` belongs behind"):
                elastic.call(lambda: 0)
            with pytest.raises(UsageError, match="lacks an optimizer"):
                for batch in allstep.steps(loader, exchange, elastic=elastic):
                    with pytest.raises(UsageError, match="would leave that batch out"):
                        elastic.state_dict()
                    for x, y in batch:
                        with pytest.raises(UsageError, match="`call` belongs behind"):
                            elastic.call(lambda: 0)
                        batch.backward((exchange.model(x) - y).square().mean())
                    with pytest.raises(UsageError, match=r"no plain data .* `float"):
                        elastic.call(lambda: torch.ones(1))
                    assert elastic.call(lambda: {"one": 1}) == {"one": 1}
                    state["optimizer"].step()
            break
    with pytest.raises(UsageError, match="entered once"):
        elastic.__enter__()


def test_steps_in_epochs_take_the_elastic() -> None:
    loader, exchange, state = lone()
    with allstep.Elastic(loader, exchange, state=state) as elastic:
        for _ in elastic.epochs(1):
            with pytest.raises(UsageError, match=r"was not given `elastic`"):
                allstep.steps(loader, exchange)
            break
    allstep.steps(loader, exchange)


def test_a_second_loop_in_one_epoch() -> None:
    loader, exchange, state = lone()
    with allstep.Elastic(loader, exchange, state=state) as elastic:
        for _ in elastic.epochs(2):
            for batch in allstep.steps(loader, exchange, elastic=elastic):
                for x, y in batch:
                    batch.backward((exchange.model(x) - y).square().mean())
            with pytest.raises(UsageError, match="A second loop over `steps`"):
                next(iter(allstep.steps(loader, exchange, elastic=elastic)))


def test_a_launcher_that_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, exchange, state = lone()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match="allstep launch --elastic"):
        allstep.Elastic(loader, exchange, state=state)


def join_with_another_schedule() -> Any:
    with init(device="cpu", timeout_s=30.0) as comm:
        loop = Loop(comm)
        loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1.0)
        state = {"optimizer": loop.optimizer, "scheduler": loop.scheduler}
        with allstep.Elastic(loop.loader, loop.exchange, state=state):
            pass


class ExponentialLR(torch.optim.lr_scheduler.ExponentialLR):
    """Freezes a layer when it is loaded."""

    model: nn.Module

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.model[0].requires_grad_(False)


def join_and_freeze() -> Any:
    with init(device="cpu", timeout_s=30.0) as comm:
        loop = Loop(comm)
        scheduler = ExponentialLR(loop.optimizer, 0.9)
        scheduler.model = loop.model
        state = {"optimizer": loop.optimizer, "scheduler": scheduler}
        loop.elastic = allstep.Elastic(loop.loader, loop.exchange, state=state)
        loop.run()


def join_with_other_data() -> Any:
    with init(device="cpu", timeout_s=30.0) as comm:
        samples = Numbered()
        samples._x[0] += 1
        with Loop(comm, samples=samples).elastic:
            pass


@pytest.mark.process
@pytest.mark.parametrize(
    ("joins", "words"),
    [
        (join_with_another_schedule, ["LambdaLR", "ExponentialLR"]),
        (join_with_other_data, ["it has samples [('dataset[0]', "]),
    ],
)
def test_joining_with_another_script(
    joins: Callable[[], Any], words: list[str], tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    """Whoever would train something else learns it; the others don't mind."""
    goes_on = tmp_path / "goes_on"
    arguments = (tmp_path, {}, {0: HeldAt("batch", 4, goes_on)})
    with contextlib.ExitStack() as stack:
        workers = started(stack, train, 1, arguments)
        joiner = started(stack, joins, 1, (), joins=workers.store_address)
        assert ended(joiner) == [1]
        message = joiner.outcomes()[0].value
        assert all(word in message for word in ["UsageError", *words]), message
        goes_on.touch()
        assert ended(workers) == [0]
        check_same(workers.outcomes()[0], undisturbed)


@pytest.mark.process
def test_joining_with_what_only_all_together_notice(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    """Only that worker ends."""
    goes_on = tmp_path / "goes_on"
    arguments = (tmp_path, {}, {0: HeldAt("batch", 4, goes_on)})
    with contextlib.ExitStack() as stack:
        workers, joiner = joined(stack, 2, arguments, join_and_freeze, goes_on)
        assert (ended(joiner), ended(workers)) == ([1], [0, 0])
        assert "DisagreementError" in joiner.outcomes()[0].value
        for rank in (0, 1):
            check_same(workers.outcomes()[rank], undisturbed)


@pytest.mark.process
def test_joining_beside_one_with_something_else(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    """Who has the same as the others stays."""
    goes_on = tmp_path / "goes_on"
    later = partial(train, tmp_path, {}, {})
    with contextlib.ExitStack() as stack:
        workers = started(stack, train, 1, (tmp_path, {}, {0: HeldAt("batch", 4, goes_on)}))
        wait_until(lambda: is_held(goes_on), workers)
        other, joiner = (
            started(stack, joins, 1, (), joins=workers.store_address)
            for joins in (join_and_freeze, later)
        )
        wait_until(lambda: num_joiners(workers.store_address) == 2, workers)
        goes_on.touch()
        assert [ended(group) for group in (other, joiner, workers)] == [[1], [0], [0]]
        assert "DisagreementError" in other.outcomes()[0].value
        for group in (workers, joiner):
            check_same(group.outcomes()[0], undisturbed)
    check_seen_once(tmp_path)


@pytest.mark.process
def test_a_launcher_asks_to_stop(tmp_path: Path) -> None:
    """Signals are the script's, which has a handler for none."""
    goes_on = tmp_path / "goes_on"
    with Workers(2, train, (tmp_path, {}, {0: HeldAt("batch", 4, goes_on)}), min_workers=1) as own:
        wait_until(lambda: is_held(goes_on), own)
        ask_to_stop(own.store_address, signal.SIGTERM)
        goes_on.touch()
        assert ended(own) == [-signal.SIGTERM] * 2, own.outcomes()


def train_for_some_epochs(changes: int) -> None:
    with init(device="cpu", timeout_s=30.0) as comm:
        Loop(comm).run(NUM_EPOCHS + changes * comm.rank)


@pytest.mark.process
def test_workers_with_other_numbers_of_epochs() -> None:
    """That of rank 0 goes on without the other one."""
    with Workers(2, train_for_some_epochs, (1,), min_workers=1) as workers:
        assert ended(workers) == [0, 1]
        assert "`num_epochs` (=4) of `epochs` differs" in workers.outcomes()[1].value


@pytest.mark.process
def test_a_worker_that_ended_as_it_waited(tmp_path: Path, undisturbed: dict[str, Tensor]) -> None:
    """On another host, whose launcher says so: nobody waits for it."""
    goes_on = tmp_path / "goes_on"
    with Workers(2, train, (tmp_path, {}, {0: HeldAt("batch", 4, goes_on)}), min_workers=1) as own:
        wait_until(lambda: is_held(goes_on), own)
        ask_and_end(own.store_address)
        goes_on.touch()
        assert ended(own) == [0, 0], own.outcomes()
        assert not has_generation(own.store_address, 1)
        for rank in (0, 1):
            check_same(own.outcomes()[rank], undisturbed)


@pytest.mark.process
@pytest.mark.parametrize("trained_from", [1, 0])  # 0: as it comes of a state that is loaded
def test_joining_where_a_layer_is_trained_by_now(trained_from: int, tmp_path: Path) -> None:
    """What stands before `with` is older than what the others train."""
    alone = Loop(Communicator.single_process(), trained_from=1).run()
    goes_on, options = tmp_path / "goes_on", {"trained_from": 1}
    held = {0: HeldAt("batch", 4, goes_on)}
    with contextlib.ExitStack() as stack:
        arguments = (tmp_path, {}, held, allstep.Elastic, options)
        own = {"trained_from": trained_from}
        later = partial(train, tmp_path, {}, {}, allstep.Elastic, own)
        workers, joiner = joined(stack, 1, arguments, later, goes_on)
        for group in (workers, joiner):
            assert ended(group) == [0], group.outcomes()[0].value
            check_same(group.outcomes()[0], alone)
        assert min(joiner.outcomes()[0].value[1]) >= 5


def test_control_of_a_layer_that_is_trained_from_the_start(undisturbed: dict[str, Tensor]) -> None:
    later = Loop(Communicator.single_process(), trained_from=1).run()
    assert differing_names(later, undisturbed)
