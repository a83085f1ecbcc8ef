"""An own loop whose processes are killed goes on, by itself and under torchrun."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from allstep import Communicator
from tests.helpers.compare import differing_names, state_difference
from tests.helpers.launched import Launched
from tests.helpers.processes import run_processes, start_processes
from tests.helpers.restarted_loop import NUM_STEPS, Moment, kill_at, train

pytestmark = pytest.mark.process
SCRIPT = Path(__file__).parents[1] / "helpers" / "restarted_loop.py"


def live(
    comm: Communicator,
    run_dir: str,
    moment: Moment | None = None,
    number: signal.Signals = signal.SIGKILL,
    ranks: tuple[int, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """One life of the loop, which sends itself a signal at a moment."""
    return train(comm, run_dir, kill_at(moment, number, ranks, comm), **options)


def live_slowly(comm: Communicator, run_dir: str) -> None:
    """As `live`, with a pause in each micro-batch, for a kill from outside to hit anywhere."""
    train(comm, run_dir, lambda moment: time.sleep(0.01), every_steps=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run_dir = str(tmp_path_factory.mktemp("whole"))
    found: dict[str, Any] = run_processes(2, _whole, run_dir)[0]
    return found


def _whole(comm: Communicator, run_dir: str) -> dict[str, Any]:
    return live(comm, run_dir, every_steps=2)


def _killed(comm: Communicator, run_dir: str, moment: Moment, ranks: tuple[int, ...]) -> None:
    live(comm, run_dir, moment, signal.SIGKILL, ranks, every_steps=2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_kill_9_at_any_moment_leaves_the_same_bits(
    seed: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    """Twice in each run; in its first life one of two workers, in the second both."""
    chance = random.Random(seed)
    run_dir = str(tmp_path)
    for ranks, num_micro_batches in (((chance.randrange(2),), 40), ((0, 1), 20)):  # of 63
        moment = ("micro-batch", chance.randrange(num_micro_batches))
        with start_processes(2, _killed, run_dir, moment, ranks) as workers:
            workers.join(timeout_s=60)
            assert -signal.SIGKILL in workers.exit_codes
    for found in run_processes(2, _whole, run_dir):
        assert not differing_names(found["model"], whole["model"])
        assert found["rate"] == whole["rate"]
        assert found["steps"][-1] == NUM_STEPS - 1


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_kill_9_from_outside_and_another_number_of_workers(
    num_workers: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    with start_processes(2, live_slowly, str(tmp_path)) as workers:
        while not (tmp_path / "checkpoints" / "step-00000004").exists():
            time.sleep(0.01)
        time.sleep(random.Random(num_workers).uniform(0, 0.2))
        workers.kill()
        workers.join(timeout_s=60)
    for found in run_processes(num_workers, _whole, str(tmp_path)):
        assert len(found["steps"]) < NUM_STEPS
        assert state_difference(found["model"], whole["model"]) < 1e-10


def _asked(comm: Communicator, run_dir: str, moment: Moment | None) -> dict[str, Any]:
    return live(comm, run_dir, moment, signal.SIGTERM, (1,), every_s=1e9)


@pytest.mark.parametrize(
    "moment",
    [
        ("micro-batch", 4),
        *(pytest.param(m, marks=pytest.mark.slow) for m in (("update", 6), ("epoch", 1))),
    ],
)
def test_sigterm_of_one_worker_ends_all_after_the_same_step(
    moment: Moment, whole: dict[str, Any], tmp_path: Path
) -> None:
    first, other = run_processes(2, _asked, str(tmp_path), moment)
    assert first["interrupted"] == other["interrupted"] == signal.SIGTERM
    assert first["steps"] == other["steps"]
    assert 0 < len(first["steps"]) < NUM_STEPS
    for found in run_processes(2, _asked, str(tmp_path), None):
        assert found["interrupted"] is None
        assert first["steps"] + found["steps"] == list(range(NUM_STEPS))
        parameters = [name for name in whole["model"] if name.endswith(("weight", "bias"))]
        assert all(torch.equal(found["model"][n], whole["model"][n]) for n in parameters)
        # Running statistics are summed over the workers when they are saved, and round then.
        assert state_difference(found["model"], whole["model"]) < 1e-12


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_starts_it_again(whole: dict[str, Any], tmp_path: Path) -> None:
    """A worker kills itself in the first attempt; torchrun stops the others and begins anew."""
    agent = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    agent += ["--max-restarts", "1", "--monitor-interval", "0.2"]
    result = tmp_path / "result.pt"
    run = Launched("-m", *agent, SCRIPT, tmp_path / "run", result, cwd=SCRIPT.parents[2])
    run.finish(within_s=250)
    assert run.code == 0, run.errors
    found = torch.load(result)
    assert found["steps"] == list(range(6, NUM_STEPS))  # of the second life
    assert not differing_names(found["model"], whole["model"])
