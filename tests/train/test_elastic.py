"""Workers are killed at any call, and others join: the training goes on, with the same bits."""

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import allstep
from allstep import Communicator, Task, TrainOptions, init
from allstep.comm.membership import Membership
from allstep.comm.wire import SingleProcessWire
from allstep.env import read_launch
from allstep.errors import PeerLostError, UsageError
from allstep.nn import MixtureOfExperts, Pipeline
from allstep.train import read_checkpoint, read_metrics
from allstep.train.checkpoint import Checkpoints
from allstep.train.elastic import StepCommit, check_backend
from allstep.train.evaluator import Evaluator
from allstep.train.fit import fit_elastic
from allstep.train.run import Run
from allstep.train.task import Stage
from tests.helpers import same_model
from tests.helpers.compare import differing_names
from tests.helpers.elastic_runs import NUM_STEPS, OPTIONS, check_same, log_of
from tests.helpers.elastic_workers import (
    TOO_LATE,
    Calls,
    Moment,
    ended,
    hold_until,
    is_held,
    wait_until,
)
from tests.helpers.joiners import asks_to_stop, has_generation, num_joiners
from tests.helpers.processes import Workers
from tests.helpers.same_model import Images

pytestmark = pytest.mark.process

NUM_CALLS = 52_000  # of functions of allstep, in a run, on each of four workers, about
NUM_SEEDS = int(os.environ.get("SEEDS", "4"))  # `make kill-anywhere` sets more
_NUM_FIRST_CALLS = 800  # until all have met for the first time


def train(
    run_dir: Path,
    dies_at: Mapping[int, Moment],
    before_step: Callable[[int], None] | None = None,
    options: TrainOptions = OPTIONS,
    make_task: Callable[[], Task] | None = None,
    until: Path | None = None,
    device: str = "cpu",
) -> int:
    """What each worker runs; returns how many calls it made."""
    rank = read_launch().rank
    task = same_model.make_task("sgd") if make_task is None else make_task()
    if before_step is not None:
        schedule = task.schedule

        def stepwise(step: int) -> float:
            before_step(step)
            return schedule(step)

        task = Task(**{**vars(task), "schedule": stepwise})
    with init(device=device, timeout_s=30.0) as comm:
        calls = Calls(dies_at.get(rank), until)
        try:
            allstep.fit(task, options, comm, run_dir, elastic=True)
        finally:
            sys.setprofile(None)
    return calls.count


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one worker that nobody has disturbed."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    allstep.fit(same_model.make_task("sgd"), OPTIONS, Communicator.single_process(), run_dir)
    return run_dir


MOMENTS: dict[str, Mapping[int, Moment]] = {
    "forward": {1: ("_add_gradient", 9)},
    "exchange of gradients": {1: ("_send_next", 9)},
    "sums of batch norm": {2: ("_sum_micro_batches", 7)},
    "before the last message": {0: ("commit", 7)},
    "update": {0: ("_apply", 7)},
    "log": {0: ("_append", 8)},
    "evaluation": {0: ("_evaluate", 3)},
    "checkpoint": {0: ("_put_in_place", 2)},
    "list of those who are left": {0: ("_apply", 7), 1: ("_came", 1), 2: ("_came", 3)},
    "meeting again": {0: ("_apply", 7), 1: ("meet", 1)},
    "beginning again": {0: ("_apply", 7), 3: ("_prepare", 2)},
    "state of the most advanced": {0: ("commit", 7), 1: ("load_state_dict", 1)},
}


QUICK = ("before the last message", "update", "checkpoint")


@pytest.mark.parametrize(
    "moment", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS]
)
def test_killed_in(moment: str, tmp_path: Path, undisturbed: Path) -> None:
    dies_at = MOMENTS[moment]
    with Workers(4, train, (tmp_path, dies_at), min_workers=1) as workers:
        codes, outcomes = ended(workers), workers.outcomes()
    expected = [-signal.SIGKILL if rank in dies_at else 0 for rank in range(4)]
    assert codes == expected, outcomes
    check_same(tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("every_steps", "number"), [(3, 2), (None, 1), pytest.param(None, 5, marks=pytest.mark.slow)]
)
def test_killed_as_it_writes_a_checkpoint(
    every_steps: int | None, number: int, tmp_path: Path
) -> None:
    """The others write that of this step in its place, also that of an epoch, and the last one."""
    changes: dict[str, Any] = {"checkpoint_every_steps": every_steps, "evaluate_every_epochs": 2}
    options = replace(OPTIONS, keep_checkpoints=100, **changes)
    arguments = (tmp_path, {0: ("write_checkpoint", number)}, None, options)
    with Workers(2, train, arguments, min_workers=1) as workers:
        assert ended(workers) == [-signal.SIGKILL, 0], workers.outcomes()
    saved = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == sorted({*range(every_steps or 4, NUM_STEPS + 1, every_steps or 4), NUM_STEPS})


def test_killed_as_it_writes_the_best_checkpoint(tmp_path: Path) -> None:
    """The others write it in its place."""
    changes: dict[str, Any] = {"best_metric": "accuracy", "checkpoint_every_steps": 1000}
    options = replace(OPTIONS, best_mode="max", **changes)
    alone, run_dir = tmp_path / "alone", tmp_path / "run"
    allstep.fit(same_model.make_task("sgd"), options, Communicator.single_process(), alone)
    values = [line["test/accuracy"] for line in read_metrics(alone) if "test/accuracy" in line]
    num_best = sum(value > max(values[:n], default=-1.0) for n, value in enumerate(values))
    num_others = int(values.index(max(values)) == len(values) - 1)  # that of the last step
    dies_at = {0: ("_put_in_place", num_best + num_others)}
    with Workers(2, train, (run_dir, dies_at, None, options), min_workers=1) as workers:
        assert ended(workers) == [-signal.SIGKILL, 0], workers.outcomes()
    best, expected = (read_checkpoint(path / "checkpoints" / "best") for path in (run_dir, alone))
    assert best["loader"]["steps"] == expected["loader"]["steps"]
    assert differing_names(best["model"], expected["model"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_killed_at_any_call(seed: int, tmp_path: Path, undisturbed: Path) -> None:
    draw = random.Random(seed)
    victims = draw.sample(range(4), draw.choice((1, 2, 3)))
    dies_at = {rank: draw.randrange(_NUM_FIRST_CALLS, NUM_CALLS) for rank in victims}
    with Workers(4, train, (tmp_path, dies_at), min_workers=1) as workers:
        codes, outcomes = ended(workers), workers.outcomes()
    assert [codes[rank] for rank in range(4) if rank not in victims] == [0] * (4 - len(victims))
    assert set(codes) <= {0, -signal.SIGKILL}, outcomes
    check_same(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [("save_best", 2), ("_apply", 9)])
def test_killed_where_the_best_checkpoint_counts(moment: Moment, tmp_path: Path) -> None:
    """Rank 0 dies while it keeps the best, or between two evaluations of which `patience` knows."""
    best = {"best_metric": "accuracy", "best_mode": "max", "patience": 3}
    options = TrainOptions(**{**vars(OPTIONS), **best})
    alone, run_dir = tmp_path / "alone", tmp_path / "run"
    task = same_model.make_task("sgd")
    report = allstep.fit(task, options, Communicator.single_process(), alone)
    with Workers(3, train, (run_dir, {0: moment}, None, options), min_workers=1) as workers:
        assert ended(workers) == [-signal.SIGKILL, 0, 0], workers.outcomes()
    assert log_of(run_dir) == log_of(alone)
    best, own = (read_checkpoint(folder / "checkpoints" / "best") for folder in (alone, run_dir))
    assert own["best"] == best["best"]
    assert own["loader"]["steps"] == report.best_step
    assert differing_names(own["model"], best["model"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_killed_and_joined_at_any_call(seed: int, tmp_path: Path, undisturbed: Path) -> None:
    """Two join while the others run, whenever they have started; any but one of all may die."""
    draw = random.Random(seed)
    victims = draw.sample(range(5), draw.choice((1, 2, 3, 4)))
    moments: dict[int, Moment] = {
        worker: draw.randrange(_NUM_FIRST_CALLS, NUM_CALLS) for worker in victims
    }
    run_dir = tmp_path / "run"
    num_lines = draw.randrange(1, 10)
    with Workers(3, train, (run_dir, moments), min_workers=1) as workers:
        wait_until(lambda: len(lines_of(run_dir)) >= num_lines or workers.wait(0), workers)
        arguments = [(run_dir, {0: moments[n]} if n in moments else {}) for n in (3, 4)]
        with (
            Workers(1, train, arguments[0], min_workers=1, joins=workers.store_address) as one,
            Workers(1, train, arguments[1], min_workers=1, joins=workers.store_address) as other,
        ):
            codes = [code for group in (workers, one, other) for code in ended(group)]
            outcomes = [group.outcomes() for group in (workers, one, other)]
    for worker, code in enumerate(codes):
        came_too_late = worker > 2 and code == 1 and TOO_LATE.search(str(outcomes)) is not None
        assert code in (0, -signal.SIGKILL) or came_too_late, outcomes
        assert worker in victims or code != -signal.SIGKILL, outcomes
    if 0 in codes:
        check_same(run_dir, undisturbed)


class HeldAt:
    """Holds a step until a file is there."""

    def __init__(self, step: int, file: Path) -> None:
        self.step, self.file = step, file

    def __call__(self, step: int) -> None:
        if step == self.step:
            hold_until(self.file)


@pytest.mark.parametrize(
    "dies",
    [
        None,
        *(pytest.param(d, marks=pytest.mark.slow) for d in ("giver", "veteran", "joiner", "taker")),
    ],
)
def test_joining(dies: str | None, tmp_path: Path, undisturbed: Path) -> None:
    """Two join after step 5 of two, of whom none is left, or one of each kind."""
    run_dir, goes_on = tmp_path / "run", tmp_path / "goes_on"
    held = HeldAt(5, goes_on)
    half = NUM_CALLS // 2
    of_first: dict[str | None, Moment] = {"veteran": half, "giver": ("send_state", 1)}
    of_joiner: dict[str | None, Moment] = {"joiner": half // 2, "taker": ("receive_state", 1)}
    begun = train, (run_dir, {0: of_first[dies]} if dies in of_first else {}, held)
    later = train, (run_dir, {0: of_joiner[dies]} if dies in of_joiner else {})
    with Workers(2, *begun, min_workers=1) as workers:
        wait_until(lambda: is_held(goes_on), workers)
        with (
            Workers(1, *later, min_workers=1, joins=workers.store_address) as first,
            Workers(1, train, (run_dir, {}), min_workers=1, joins=workers.store_address) as second,
        ):
            wait_until(lambda: num_joiners(workers.store_address) == 2, workers)
            goes_on.touch()
            expected = [-signal.SIGKILL, 0] if dies in of_first else [0, 0]
            assert ended(workers) == expected, workers.outcomes()
            expected = [-signal.SIGKILL if dies in of_joiner else 0]
            assert ended(first) == expected, first.outcomes()
            assert ended(second) == [0], second.outcomes()
            assert second.outcomes()[0].value > 1000  # it has trained
    check_same(run_dir, undisturbed)


def ask_to_join(moment: Moment | None, log: Path) -> None:
    """As a worker that may be killed meanwhile, and soon says that it waits."""
    logger = logging.getLogger("allstep")
    logger.addHandler(logging.FileHandler(log))
    logger.setLevel(logging.INFO)
    membership = Membership(read_launch(), grace_s=30.0, notice_s=0.1)
    if moment is not None:
        Calls(moment)
    membership.next(-1)


@pytest.mark.parametrize(
    "moment", [("text", 1), pytest.param(("_check_can_join", 1), marks=pytest.mark.slow)]
)
def test_a_worker_that_is_killed_as_it_asks_to_join(
    moment: Moment, tmp_path: Path, undisturbed: Path
) -> None:
    """Another joins after it."""
    run_dir, goes_on = tmp_path / "run", tmp_path / "goes_on"
    with Workers(1, train, (run_dir, {}, HeldAt(5, goes_on)), min_workers=1) as workers:
        wait_until(lambda: is_held(goes_on), workers)
        asks = ask_to_join, (moment, tmp_path / "log")
        with Workers(1, *asks, min_workers=1, joins=workers.store_address) as first:
            assert ended(first) == [-signal.SIGKILL]
        num_before = num_joiners(workers.store_address)
        later = Workers(1, train, (run_dir, {}), min_workers=1, joins=workers.store_address)
        with later as second:
            wait_until(lambda: num_joiners(workers.store_address) > num_before, workers)
            goes_on.touch()
            assert ended(workers) == [0]
            assert ended(second) == [0], second.outcomes()
            assert second.outcomes()[0].value > 1000  # it has trained
    check_same(run_dir, undisturbed)


def test_a_worker_that_waits_long_to_join_says_for_whom(tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    goes_on = tmp_path / "never"
    with Workers(1, train, (run_dir, {}, HeldAt(5, goes_on)), min_workers=1) as workers:
        wait_until(lambda: is_held(goes_on), workers)
        asks = ask_to_join, (None, log)
        with Workers(1, *asks, min_workers=1, joins=workers.store_address) as joiner:
            wait_until(lambda: log.exists() and "\n" in log.read_text(), joiner)
        assert "this worker waits to join for 0.1 s" in log.read_text()
        assert f"a step of rank 0 (process {workers.pids[0]} on " in log.read_text()


def test_joining_a_generation_that_is_written_while_one_looks(
    tmp_path: Path, undisturbed: Path
) -> None:
    """The joiner is held after it has looked for a list, until there is one with itself on it."""
    run_dir, goes_on, is_written = (tmp_path / name for name in ("run", "goes_on", "is_written"))
    held = (run_dir, {0: ("_check_can_join", 1)}, None, OPTIONS, None, is_written)
    with Workers(1, train, (run_dir, {}, HeldAt(5, goes_on)), min_workers=1) as workers:
        wait_until(lambda: is_held(goes_on), workers)
        with Workers(1, train, held, min_workers=1, joins=workers.store_address) as joiner:
            wait_until(lambda: num_joiners(workers.store_address) == 1, workers)
            goes_on.touch()
            wait_until(lambda: has_generation(workers.store_address, 1), workers)
            is_written.touch()
            assert ended(joiner) == [0], joiner.outcomes()
        assert ended(workers) == [0]
    check_same(run_dir, undisturbed)


@pytest.mark.slow
def test_all_that_began_are_lost(tmp_path: Path, undisturbed: Path) -> None:
    run_dir, goes_on = tmp_path / "run", tmp_path / "goes_on"
    both_die = {0: ("commit", 11), 1: ("commit", 14)}  # the third has the state since step 6
    with Workers(2, train, (run_dir, both_die, HeldAt(5, goes_on)), min_workers=1) as workers:
        wait_until(lambda: is_held(goes_on), workers)
        with Workers(1, train, (run_dir, {}), min_workers=1, joins=workers.store_address) as joiner:
            wait_until(lambda: num_joiners(workers.store_address) == 1, workers)
            goes_on.touch()
            assert ended(workers) == [-signal.SIGKILL] * 2
            assert ended(joiner) == [0], joiner.outcomes()
    check_same(run_dir, undisturbed)


@pytest.mark.slow
def test_all_that_began_are_lost_and_too_few_are_left(tmp_path: Path) -> None:
    """Those who joined know with how few the run ends."""
    run_dir, goes_on = tmp_path / "run", tmp_path / "goes_on"
    both_die = {0: ("commit", 11), 1: ("commit", 14)}  # the third has the state since step 6
    with Workers(2, train, (run_dir, both_die, HeldAt(5, goes_on)), min_workers=2) as workers:
        wait_until(lambda: is_held(goes_on), workers)
        with Workers(1, train, (run_dir, {}), min_workers=2, joins=workers.store_address) as joiner:
            wait_until(lambda: num_joiners(workers.store_address) == 1, workers)
            goes_on.touch()
            assert ended(joiner) == [1], joiner.outcomes()
            assert "fewer than `min_workers` (=2)" in joiner.outcomes()[0].value
    assert len(lines_of(run_dir)) < NUM_STEPS


def test_a_launcher_that_has_lost_its_workers_is_asked_to_end(
    tmp_path: Path, undisturbed: Path
) -> None:
    """Those who joined stop after their step, with a checkpoint, from which the run goes on."""
    run_dir, goes_on, is_asked = (tmp_path / name for name in ("run", "goes_on", "is_asked"))
    begun = (run_dir, {0: ("commit", 8)}, HeldAt(5, goes_on))
    with Workers(1, train, begun, min_workers=1) as workers:
        wait_until(lambda: is_held(goes_on), workers)
        later = (run_dir, {}, HeldAt(9, is_asked))
        with Workers(1, train, later, min_workers=1, joins=workers.store_address) as joiner:
            wait_until(lambda: num_joiners(workers.store_address) == 1, workers)
            goes_on.touch()
            assert ended(workers) == [-signal.SIGKILL]
            with ThreadPoolExecutor(1) as pool:
                code = pool.submit(workers.await_others, [signal.SIGINT])
                wait_until(lambda: code.done() or asks_to_stop(workers.store_address), joiner)
                is_asked.touch()
                assert code.result() == 128 + signal.SIGINT
            assert ended(joiner) == [0], joiner.outcomes()
    assert len(lines_of(run_dir)) < NUM_STEPS
    task, comm = same_model.make_task("sgd"), Communicator.single_process()
    allstep.fit(task, OPTIONS, comm, run_dir, resume=True)
    check_same(run_dir, undisturbed)


@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_worker_is_left_behind_and_joins_again(
    stopped: int, tmp_path: Path, undisturbed: Path
) -> None:
    """It wakes when the others have gone on: it is on no list, and comes as any other would.

    That which was rank 0 has the lock on the run's folder while it is stopped.
    """
    run_dir, goes_on = tmp_path / "run", tmp_path / "goes_on"
    arguments = (run_dir, HeldAt(9, goes_on), 1 - stopped)
    with Workers(3, train_impatiently, arguments, min_workers=1) as workers:
        wait_until(lambda: len(lines_of(run_dir)) >= 4, workers)
        workers.kill(stopped, signal_number=signal.SIGSTOP)
        wait_until(lambda: len(lines_of(run_dir)) >= 9 or workers.wait(0), workers)
        workers.kill(stopped, signal_number=signal.SIGCONT)
        wait_until(lambda: num_joiners(workers.store_address) == 1, workers)
        goes_on.touch()
        assert ended(workers) == [0, 0, 0]
    check_same(run_dir, undisturbed)


def train_impatiently(run_dir: Path, before_step: Callable[[int], None], held: int) -> None:
    """As `train`, with workers that wait for each other for some seconds, as one is held meanwhile.

    Args:
        held: the rank on which `before_step` is called.
    """
    task = same_model.make_task("sgd")
    rank, schedule = read_launch().rank, task.schedule

    def stepwise(step: int) -> float:
        if rank == held:
            before_step(step)
        return schedule(step)

    task = Task(**{**vars(task), "schedule": stepwise})
    with init(device="cpu", timeout_s=30.0) as comm:
        comm.set_timeout(4.0)
        membership = Membership(read_launch(), grace_s=4.0)
        fit_elastic(task, OPTIONS, comm, run_dir, membership)


def lines_of(run_dir: Path) -> list[str]:
    file = run_dir / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def wait_for_one_that_computes(kind: str, folder: Path) -> float:
    """Rank 0 waits for rank 1, which never comes; rank 2 is killed. Seconds until it fails.

    Rank 1 computes until then: its end would let rank 0 fail, too.
    """
    with init(device="cpu", timeout_s=60.0) as comm:
        membership = Membership(read_launch(), grace_s=1.0)
        membership.begin(comm)
        part = comm.split(0) if kind == "group that was split off" else comm
        assert part is not None
        part.barrier()
        (folder / f"rank-{comm.rank}").touch()
        has_failed = folder / "has_failed"
        if comm.rank == 2:
            while not all((folder / f"rank-{rank}").exists() for rank in range(2)):
                time.sleep(0.01)  # else it may take the others' barrier along
            os.kill(os.getpid(), signal.SIGKILL)
        start_s = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(PeerLostError):
                part.recv(source=1)
            has_failed.touch()
        while not has_failed.exists():
            time.sleep(0.01)
        membership.end()
        comm.abort()
    return time.monotonic() - start_s


@pytest.mark.parametrize(
    "kind", ["first group", pytest.param("group that was split off", marks=pytest.mark.slow)]
)
def test_waiting_for_one_that_lives_when_another_is_lost(kind: str, tmp_path: Path) -> None:
    arguments = (kind, tmp_path)
    with Workers(3, wait_for_one_that_computes, arguments, min_workers=1) as workers:
        assert ended(workers) == [0, 0, -signal.SIGKILL], workers.outcomes()
        assert workers.outcomes()[0].value < 30


def task_in_stages() -> Task:
    """From epoch 2 on with fewer samples."""
    task = same_model.make_task("sgd")
    batches = {"global_batch": same_model.GLOBAL_BATCH, "micro_batch": same_model.MICRO_BATCH}
    later = Stage(first_epoch=2, train_set=Images(200), test_set=Images(30), **batches)
    return replace(task, later_stages=(later,))


@pytest.mark.slow
def test_killed_in_the_first_step_of_a_stage(tmp_path: Path) -> None:
    allstep.fit(task_in_stages(), OPTIONS, Communicator.single_process(), tmp_path / "undisturbed")
    dies_at = {1: ("_add_gradient", 2 * (4 * 3 + 2) + 1)}  # three of 12, thrice, and two of 6
    arguments = (tmp_path / "run", dies_at, None, OPTIONS, task_in_stages)
    with Workers(3, train, arguments, min_workers=1) as workers:
        assert ended(workers) == [0, -signal.SIGKILL, 0], workers.outcomes()
    assert log_of(tmp_path / "run") == log_of(tmp_path / "undisturbed")


def test_state_at_step_start_of_a_module_with_two_names() -> None:
    """Its buffers are two entries of the model's state."""
    task = same_model.make_task("sgd")
    norm = task.model.get_submodule("1")
    task.model.add_module("again", nn.Sequential(norm))
    elastic = cast(StepCommit, SimpleNamespace(commit=None))
    with closing(Run(task, OPTIONS, Communicator.single_process(), elastic)) as run:
        expected = {name: value.clone() for name, value in run.state_dict()["model"].items()}
        norm.get_buffer("running_mean").fill_(7.0)
        assert differing_names(run.state_at_step_start()["model"], expected) == []


def train_with_a_lost_answer(run_dir: Path, after: str, num_calls: int) -> None:
    """On rank 1 the last message of a call is lost, which the others have got."""
    owner, name = {"evaluation": (Evaluator, "__call__"), "save": (Checkpoints, "save")}[after]
    call, rank, num_left = getattr(owner, name), read_launch().rank, num_calls

    def losing(self: Any, *args: Any) -> Any:
        nonlocal num_left
        result, num_left = call(self, *args), num_left - 1
        if rank == 1 and num_left == 0:
            raise PeerLostError("the connection was closed")
        return result

    setattr(owner, name, losing)
    train(run_dir, {})


@pytest.mark.parametrize(
    ("after", "num_calls"),
    [
        ("evaluation", 2),
        pytest.param("evaluation", 5, marks=pytest.mark.slow),
        pytest.param("save", 2, marks=pytest.mark.slow),
    ],
)
def test_one_has_missed_the_end_of_a_call(
    after: str, num_calls: int, tmp_path: Path, undisturbed: Path
) -> None:
    """Workers that have made the same steps are not always at the same place."""
    arguments = (tmp_path, after, num_calls)
    with Workers(3, train_with_a_lost_answer, arguments, min_workers=1) as workers:
        assert ended(workers) == [0, 0, 0], workers.outcomes()
    check_same(tmp_path, undisturbed)


def test_fewer_than_min_workers(tmp_path: Path) -> None:
    with Workers(3, train, (tmp_path, {0: 20_000}), min_workers=3) as workers:
        assert ended(workers) == [-signal.SIGKILL, 1, 1]
        for rank in (1, 2):
            assert "2 workers are left, fewer than `min_workers` (=3)" in (
                workers.outcomes()[rank].value
            )
            assert PeerLostError.__name__ in workers.outcomes()[rank].value


def test_joining_with_other_options(tmp_path: Path, undisturbed: Path) -> None:
    """Whoever would train something else learns it; the others don't mind."""
    run_dir, goes_on = tmp_path / "run", tmp_path / "goes_on"
    other = TrainOptions(**{**vars(OPTIONS), "seed": 12})
    with Workers(1, train, (run_dir, {}, HeldAt(5, goes_on)), min_workers=1) as workers:
        wait_until(lambda: is_held(goes_on), workers)
        arguments = (run_dir, {}, None, other)
        with Workers(1, train, arguments, min_workers=1, joins=workers.store_address) as joiner:
            assert ended(joiner) == [1]
            message = joiner.outcomes()[0].value
            assert UsageError.__name__ in message
            assert "it has options: seed 12" in message
            assert "the others have options: seed 11" in message
        goes_on.touch()
        assert ended(workers) == [0]
    check_same(run_dir, undisturbed)


def with_another_sample(name: str) -> Task:
    """As many samples; the first one is another."""
    task = same_model.make_task("sgd", augment=False)
    dataset = getattr(task, name)
    dataset._x[0] += 1
    return task


@pytest.mark.parametrize("name", ["train_set", "test_set"])
def test_joining_with_other_data(name: str, tmp_path: Path) -> None:
    """Whoever would train on other samples learns it; the others don't mind."""
    goes_on = tmp_path / "goes_on"
    same = partial(same_model.make_task, "sgd", augment=False)
    held = (tmp_path / "run", {}, HeldAt(5, goes_on), OPTIONS, same)
    with Workers(1, train, held, min_workers=1) as workers:
        wait_until(lambda: is_held(goes_on), workers)
        arguments = (tmp_path / "run", {}, None, OPTIONS, partial(with_another_sample, name))
        with Workers(1, train, arguments, min_workers=1, joins=workers.store_address) as joiner:
            assert ended(joiner) == [1]
            message = joiner.outcomes()[0].value
        goes_on.touch()
        assert ended(workers) == [0]
    assert f"This worker can't join: it has stages[0].{name} (" in message
    assert "dataset[0]" in message


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"compression": "fp32"}, "`compression` (='fp32')"),
        ({"staleness": 1}, "`staleness` (=1)"),
        ({"sync_every": 4}, "`sync_every` (=4)"),
        ({"noise_scale_every_steps": 10}, "`noise_scale_every_steps` (=10)"),
        ({"shares": "3,1"}, "`shares` (='3,1')"),
        ({"compile": True}, "`compile` (=True)"),
    ],
)
def test_options_that_cannot_be_elastic(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    options = TrainOptions(**{**vars(OPTIONS), **changed})
    task = same_model.make_task("sgd")
    with pytest.raises(UsageError) as error:
        allstep.fit(task, options, Communicator.single_process(), tmp_path, elastic=True)
    assert named in str(error.value)
    assert list(tmp_path.iterdir()) == []


def a_pipeline(comm: Communicator) -> nn.Module:
    mesh = comm.mesh(pipeline=1)
    return Pipeline([nn.Linear(2, 1)], mesh, loss=lambda y, data: y.mean())


def experts(comm: Communicator) -> nn.Module:
    return MixtureOfExperts(lambda: nn.Linear(2, 2), comm, 2, 2)


@pytest.mark.parametrize(
    ("make", "divided"), [(a_pipeline, "stages"), (experts, "experts")], ids=["pipeline", "experts"]
)
def test_a_model_that_will_be_divided_is_refused_on_one_worker(
    make: Callable[[Communicator], nn.Module], divided: str, tmp_path: Path
) -> None:
    comm = Communicator.single_process()
    task = replace(same_model.make_task("sgd"), model=make(comm))
    words = rf"`task\.model\.{divided}` is divided over workers, and its parts would go"
    with pytest.raises(UsageError, match=words):
        allstep.fit(task, OPTIONS, comm, tmp_path, elastic=True)
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_that_ends_all(tmp_path: Path) -> None:
    task = same_model.make_task("sgd")
    with pytest.raises(UsageError, match="allstep train RECIPE --elastic"):
        allstep.fit(task, OPTIONS, Communicator.single_process(), tmp_path, elastic=True)


def test_a_backend_that_does_not_let_go_of_a_lost_worker() -> None:
    wire = SingleProcessWire(timeout_s=1.0)  # which carries tensors of any device as they are
    check_backend(
        cast(Communicator, SimpleNamespace(size=2, device=torch.device("cpu"), wire=wire))
    )
    meta = cast(Communicator, SimpleNamespace(size=2, device=torch.device("meta"), wire=wire))
    with pytest.raises(UsageError, match="a backend for meta that does not let go"):
        check_backend(meta)
