"""One worker fails, all stop; Ctrl-C and SIGTERM end a run; nothing stays behind."""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from allstep.cli.why import find_cause
from allstep.comm import read_states
from tests.helpers.launched import Launched

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parent / "faults.py"
STOP_S = 20.0  # less than what hangs on purpose, or is given time to end, takes


class Faulty(Launched):
    """A run of `faults.py`."""

    def __init__(self, num_workers: int, fault: str, marks: Path) -> None:
        super().__init__(SCRIPT, num_workers, fault, marks)
        self._files = [marks / str(rank) for rank in range(num_workers)]

    def pids(self) -> list[int]:
        """Process ids of the workers, as soon as all of them are about to go wrong."""
        self.wait_until(lambda: all(file.exists() and file.read_text() for file in self._files))
        return [int(file.read_text()) for file in self._files]

    def finish(self, within_s: float) -> None:
        """What is told of workers that a busy machine is slow to start is no error."""
        super().finish(within_s)
        lines = self.errors.splitlines(keepends=True)
        self.errors = "".join(line for line in lines if not line.startswith("`init` has waited "))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("fit_raise_in_loader", "RuntimeError: a sample that can't be read"),
        *(
            pytest.param(fault, error, marks=pytest.mark.slow)
            for fault, error in (
                ("raise_in_collective", "ZeroDivisionError: on purpose"),
                ("raise_everywhere", "ZeroDivisionError: on purpose"),
                ("raise_while_peers_compute", "ZeroDivisionError: on purpose"),
                ("raise_in_loader", "RuntimeError: a sample that can't be read"),
                ("fit_raise_in_loss", "ZeroDivisionError: on purpose"),
            )
        ),
    ],
)
def test_an_exception_ends_all_workers_with_one_traceback(tmp_path, fault, error):
    run = Faulty(2, fault, tmp_path)
    run.pids()
    run.finish(within_s=STOP_S)
    assert run.code == 1
    assert run.errors.count("] failed:\n") == 1
    assert run.errors.count(f"\n{error}\n") == 1
    assert run.errors.count("in run_worker") == 1
    assert not list(tmp_path.glob("*.done"))
    if fault.startswith("fit_"):
        found = find_cause(read_states(tmp_path / "run"), exits=None)
        assert (found.what, found.rank) == ("failed", 1)
        assert error in found.words


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise_usage", "error: `width` (=0) must be at least 1.\n"),
        pytest.param("raise_data_error", "error: cat.jpg is no image.\n", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_own_error_is_one_line_and_exit_code_2(tmp_path, fault, message, num_workers):
    run = Faulty(num_workers, fault, tmp_path)
    run.pids()
    run.finish(within_s=STOP_S)
    assert run.errors == message
    assert run.code == 2


def test_a_lone_worker_fails_with_a_plain_traceback(tmp_path):
    run = Faulty(1, "raise_everywhere", tmp_path)
    run.pids()
    run.finish(within_s=STOP_S)
    assert run.code == 1
    assert run.errors.startswith("Traceback")
    assert run.errors.count("ZeroDivisionError: on purpose") == 1


@pytest.mark.parametrize(
    "fault",
    [
        "hang_in_collective",
        pytest.param("hang_in_compute", marks=pytest.mark.long),
        pytest.param("hang_in_loader", marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_is_named_and_its_peers_end(tmp_path, fault):
    run = Faulty(3, fault, tmp_path)
    psutil.Process(run.pids()[1]).kill()
    run.finish(within_s=STOP_S)
    assert run.errors == "error: worker 1 was killed by SIGKILL (out of memory?)\n"
    assert run.code == 1


def is_stuck(loader: psutil.Process) -> bool:
    """Whether it reads a sample of `Stuck`, which all are asked for once all have been started."""
    status = Path(f"/proc/{loader.pid}/status").read_text()
    ignored = int(re.findall(r"SigIgn:\s*(\w+)", status)[0], 16)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


def test_workers_end_when_their_launcher_is_killed(tmp_path):
    run = Faulty(2, "hang_in_loader", tmp_path)
    workers = [psutil.Process(pid) for pid in run.pids()]
    # A loader that is being started meanwhile may outlive its worker until it looks for it.
    run.wait_until(lambda: all(sum(map(is_stuck, w.children())) == 2 for w in workers))
    family = psutil.Process(run.process.pid).children(recursive=True)
    run.process.kill()
    _, alive = psutil.wait_procs(family, timeout=STOP_S)
    assert not alive
    run.process.communicate()


@pytest.mark.parametrize(
    ("num_workers", "number"),
    [
        (2, signal.SIGTERM),
        pytest.param(1, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_lets_every_worker_finish(tmp_path, number, num_workers):
    run = Faulty(num_workers, "work_until_asked", tmp_path)
    run.pids()
    run.process.send_signal(number)
    run.finish(within_s=STOP_S)
    assert run.errors == ""
    assert run.code == 128 + number
    assert len(list(tmp_path.glob("*.done"))) == num_workers


@pytest.mark.slow
def test_a_signal_to_one_worker_ends_the_run_with_its_exit_code(tmp_path):
    run = Faulty(2, "work_until_asked", tmp_path)
    psutil.Process(run.pids()[1]).send_signal(signal.SIGTERM)
    run.finish(within_s=STOP_S)
    assert run.errors == ""
    assert run.code == 128 + signal.SIGTERM
    assert len(list(tmp_path.glob("*.done"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_second_signal_ends_what_does_not_answer(tmp_path, num_workers):
    run = Faulty(num_workers, "hang_in_loader", tmp_path)
    run.pids()
    run.process.send_signal(signal.SIGINT)
    time.sleep(2.5)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    run.finish(within_s=STOP_S)
    assert run.code == 128 + signal.SIGINT
    assert not list(tmp_path.glob("*.done"))
