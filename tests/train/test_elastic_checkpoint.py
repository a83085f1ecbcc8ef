"""An elastic loop that keeps checkpoints: whoever is lost, they are written, and it goes on."""

import contextlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import allstep
from allstep import Communicator, init
from allstep.env import read_launch
from allstep.errors import PeerLostError
from allstep.train.run_lock import trainer_of
from tests.helpers.compare import differing_names
from tests.helpers.elastic_workers import Calls, Moment, ended, hold_until, is_held, wait_until
from tests.helpers.joiners import num_joiners
from tests.helpers.processes import Workers
from tests.helpers.restarted_loop import NUM_STEPS, kill_at, train

pytestmark = pytest.mark.process

NUM_SEEDS = int(os.environ.get("SEEDS", "3"))  # `make kill-anywhere` sets more
# Of functions of allstep, in a run; and until all have met.
_NUM_CALLS, _NUM_FIRST_CALLS = 40_000, 3_700


def live(
    run_dir: str | None,
    dies_at: dict[int, Moment] | None = None,
    moment: tuple[str, int] | None = None,
    number: int = signal.SIGKILL,
    ranks: tuple[int, ...] = (),
    held_at: tuple[str, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One life of a worker.

    Args:
        run_dir: of the checkpoints.
        dies_at: the call of allstep's at which a rank is killed.
        moment, number, ranks: where in its own code which ranks get a signal.
        held_at: where in its own code a worker is held until the file "goes_on" is there.
        options: of `Elastic`.
    """
    with init(device="cpu", timeout_s=30.0) as comm:
        rank = read_launch().rank
        Calls((dies_at or {}).get(rank))
        gets_signal = kill_at(moment, signal.Signals(number), ranks, comm)

        def happens(now: tuple[str, int]) -> None:
            if now == held_at and run_dir is not None:
                hold_until(Path(run_dir) / "goes_on")
            gets_signal(now)

        try:
            return train(comm, run_dir, happens, elastic=True, **{"every_steps": 2, **options})
        finally:
            sys.setprofile(None)


def run(num_workers: int, run_dir: Path, *given: Any, **options: Any) -> tuple[list[Any], Any]:
    """One life on some workers; exit codes, and what came of it by rank."""
    arguments = (str(run_dir), *given)
    with Workers(num_workers, Life(options), arguments, min_workers=1) as workers:
        return ended(workers), workers.outcomes()


class Life:
    """`live` with options."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def __call__(self, *given: Any) -> dict[str, Any]:
        return live(*given, **self._options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run_dir = str(tmp_path_factory.mktemp("whole"))
    return train(Communicator.single_process(), run_dir, elastic=True)


def check_same(found: dict[str, Any], whole: dict[str, Any]) -> None:
    assert differing_names(found["model"], whole["model"]) == []
    assert found["rate"] == whole["rate"]


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


KILLS: dict[str, dict[int, Moment]] = {
    "before it writes": {0: ("write_checkpoint", 3)},
    "as it writes": {0: ("_write_manifest_of", 3)},
    "behind it": {0: ("_delete_old", 3)},
    "one that compares": {1: ("_check_same_state", 3)},
    "the next one, too": {0: ("write_checkpoint", 3), 1: ("write_checkpoint", 1)},
    "as it writes the last": {0: ("write_checkpoint", 6)},
}


@pytest.mark.parametrize(
    "moment",
    [m if m == "before it writes" else pytest.param(m, marks=pytest.mark.slow) for m in KILLS],
)
def test_killed(moment: str, whole: dict[str, Any], tmp_path: Path) -> None:
    """The next rank 0 writes what the one that was lost had still to write."""
    kills = KILLS[moment]
    codes, outcomes = run(3, tmp_path, kills, keep=100)
    assert codes == [-signal.SIGKILL if rank in kills else 0 for rank in range(3)], outcomes
    for rank in set(range(3)) - kills.keys():
        check_same(outcomes[rank].value, whole)
    assert saved_steps(tmp_path) == list(range(2, NUM_STEPS + 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_killed_at_any_call(seed: int, whole: dict[str, Any], tmp_path: Path) -> None:
    draw = random.Random(seed)
    victims = draw.sample(range(3), draw.choice((1, 2)))
    kills: dict[int, Moment] = {n: draw.randrange(_NUM_FIRST_CALLS, _NUM_CALLS) for n in victims}
    codes, outcomes = run(3, tmp_path, kills, every_steps=1, keep=100)
    for rank, code in enumerate(codes):
        assert code == 0 or (rank in victims and code == -signal.SIGKILL), outcomes
        if code == 0:
            check_same(outcomes[rank].value, whole)
    assert saved_steps(tmp_path) == list(range(1, NUM_STEPS + 1))
    codes, outcomes = run(2, tmp_path)
    assert [outcomes[rank].value["steps"] for rank in range(2)] == [[], []]
    for rank in range(2):
        check_same(outcomes[rank].value, whole)


@pytest.mark.parametrize(("before", "after"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_all_are_killed(before: int, after: int, whole: dict[str, Any], tmp_path: Path) -> None:
    """And other workers go on, one of which is lost, too."""
    moment = ("update", 5)
    codes, _ = run(before, tmp_path, None, moment, signal.SIGKILL, tuple(range(before)))
    assert codes == [-signal.SIGKILL] * before
    lost = () if after == 1 else (0,)
    codes, outcomes = run(after, tmp_path, None, ("update", 7), signal.SIGKILL, lost)
    assert codes == [-signal.SIGKILL if rank in lost else 0 for rank in range(after)], outcomes
    for rank in set(range(after)) - set(lost):
        assert outcomes[rank].value["steps"] == list(range(4, NUM_STEPS))
        check_same(outcomes[rank].value, whole)


@pytest.mark.parametrize(
    "moment", [("micro-batch", 4), pytest.param(("epoch", 0), marks=pytest.mark.slow)]
)
def test_sigterm_of_one_worker(
    moment: tuple[str, int], whole: dict[str, Any], tmp_path: Path
) -> None:
    """All stop after the same step, with its checkpoint."""
    codes, outcomes = run(2, tmp_path, None, moment, signal.SIGTERM, (1,), every_steps=None)
    assert codes == [0, 0], outcomes
    first, other = (outcomes[rank].value for rank in range(2))
    assert first["interrupted"] == other["interrupted"] == signal.SIGTERM
    assert first["steps"] == other["steps"]
    assert 0 < len(first["steps"]) < NUM_STEPS
    assert max(saved_steps(tmp_path)) == len(first["steps"])
    codes, outcomes = run(2, tmp_path, every_steps=None)
    assert codes == [0, 0], outcomes
    for rank in range(2):
        assert first["steps"] + outcomes[rank].value["steps"] == list(range(NUM_STEPS))
        check_same(outcomes[rank].value, whole)


def hold_the_folder(run_dir: str) -> tuple[dict[str, Any], list[str | None]]:
    """A life whose rank 0 is killed; who holds the folder at each update of the other one."""
    holders: list[str | None] = []
    with init(device="cpu", timeout_s=30.0) as comm:
        kills = kill_at(("update", 2), signal.SIGKILL, (0,), comm)

        def happens(now: tuple[str, int]) -> None:
            if comm.size == 1:
                holders.append(trainer_of(Path(run_dir)))
            else:
                kills(now)

        return train(comm, run_dir, happens, elastic=True, every_steps=100), holders


def test_the_next_rank_0_holds_the_folder(whole: dict[str, Any], tmp_path: Path) -> None:
    """Before it has anything to write."""
    with Workers(2, hold_the_folder, (str(tmp_path),), min_workers=1) as workers:
        assert ended(workers) == [-signal.SIGKILL, 0], workers.outcomes()
        found, holders = workers.outcomes()[1].value
        pid = workers.pids[1]
    check_same(found, whole)
    assert all(holder is not None and f"process {pid} on" in holder for holder in holders)


def miss_the_end_of_a_save(run_dir: str, dies: int) -> dict[str, Any]:
    """Rank 2 is killed behind the first save of this life, of whose end rank 1 does not hear."""
    with init(device="cpu", timeout_s=30.0) as comm:
        barrier, rank, num_left = comm.barrier, comm.rank, 1 + dies

        def losing() -> None:
            nonlocal num_left
            barrier()
            num_left -= 1
            if num_left == 0 and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if num_left == 0 and rank == 1:
                raise PeerLostError("the connection was closed")

        comm.barrier = losing  # type: ignore[method-assign]
        return train(comm, run_dir, elastic=True)


def test_a_life_that_begins_behind_an_epochs_last_step(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    """The places that workers come to go on growing."""
    run(1, tmp_path, None, ("epoch", 1), signal.SIGKILL, (0,), every_steps=None)
    with Workers(3, miss_the_end_of_a_save, (str(tmp_path), 0), min_workers=1) as workers:
        assert ended(workers) == [0, 0, -signal.SIGKILL], workers.outcomes()
        for rank in range(2):
            found = workers.outcomes()[rank].value
            assert found["steps"] == list(range(8, NUM_STEPS))
            check_same(found, whole)


@pytest.mark.slow
def test_who_joins_writes_them_later(whole: dict[str, Any], tmp_path: Path) -> None:
    """All that have begun are lost, rank 0 before it has written."""
    run_dir, held_at = str(tmp_path), ("update", 4)
    dies_at = {0: ("write_checkpoint", 4), 1: ("write_parts", 4)}
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(
            Workers(
                2,
                Life({"held_at": held_at, "keep": 100}),
                (run_dir, dies_at),
                min_workers=1,
            )
        )
        wait_until(lambda: is_held(tmp_path / "goes_on"), workers)
        joiner = stack.enter_context(
            Workers(1, Life({"keep": 100}), (run_dir,), min_workers=1, joins=workers.store_address)
        )
        wait_until(lambda: num_joiners(workers.store_address) == 1, workers)
        (tmp_path / "goes_on").touch()
        assert ended(workers) == [-signal.SIGKILL] * 2, workers.outcomes()
        assert ended(joiner) == [0], joiner.outcomes()
        check_same(joiner.outcomes()[0].value, whole)
    assert saved_steps(tmp_path) == list(range(2, NUM_STEPS + 1, 2))


@pytest.mark.parametrize(
    ("kind", "words"),
    [("other steps", "`every_steps`"), ("no folder", "call the same verbs in the same order")],
)
def test_workers_that_save_otherwise(kind: str, words: str, tmp_path: Path) -> None:
    with Workers(2, save_otherwise, (kind, str(tmp_path)), min_workers=1) as workers:
        assert ended(workers) == [1, 1]
        for rank in range(2):
            assert words in workers.outcomes()[rank].value


def save_otherwise(kind: str, run_dir: str | None) -> None:
    rank = read_launch().rank
    if kind == "no folder":
        live(None if rank else run_dir)
    else:
        live(run_dir, every_steps=2 + rank)


def test_a_state_that_workers_have_each_their_own(tmp_path: Path) -> None:
    """Would be rank 0's for all of them."""
    with Workers(2, keep_own_number, (str(tmp_path),), min_workers=1) as workers:
        assert ended(workers) == [1, 1]
        assert "DisagreementError" in workers.outcomes()[0].value


class Own:
    """A part of the state."""

    def __init__(self, rank: int) -> None:
        self._number = torch.tensor(float(rank))

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._number = state["number"]


def keep_own_number(run_dir: str) -> None:
    with init(device="cpu", timeout_s=30.0) as comm:
        model = torch.nn.Linear(2, 1)
        exchange = allstep.attach(model, comm, allstep.Synchronous(compression="exact"))
        samples = torch.utils.data.TensorDataset(torch.ones(4, 2))
        loader = allstep.data.loader(samples, comm, global_batch=2, micro_batch=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"optimizer": optimizer, "own": Own(comm.rank)}
        with allstep.Elastic(loader, exchange, state=state, run_dir=run_dir) as elastic:
            for _ in elastic.epochs(1):
                for batch in allstep.steps(loader, exchange, elastic=elastic):
                    for (x,) in batch:
                        batch.backward(model(x).mean())
                    optimizer.step()
                    optimizer.zero_grad()
