"""`allstep train --elastic` and `allstep join`."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from allstep.cli.exits import StoreRecord, keeping_store, read_store
from allstep.cli.main import main
from allstep.comm import read_states
from allstep.errors import UsageError
from allstep.train.metrics import read_metrics
from tests.helpers.joiners import num_joiners
from tests.helpers.launched import Launched


def start(run_dir: Path, *, epochs: int) -> Launched:
    """`digits` on two workers, which have made some steps."""
    flags = ("--workers", 2, "--elastic", "--run-dir", run_dir, "--epochs", epochs)
    training = Launched("-m", "allstep", "train", "digits", *flags)
    training.wait_until(lambda: (run_dir / "metrics.jsonl").exists())
    return training


@pytest.mark.slow
@pytest.mark.process
def test_a_worker_is_lost_and_another_joins(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    training = start(run_dir, epochs=3)
    first, second = training.workers()
    second.send_signal(signal.SIGSTOP)  # all wait until the other has come
    joining = Launched("-m", "allstep", "join", run_dir)
    joining.wait_until(lambda: num_joiners(read_store(run_dir).port) == 1)
    first.send_signal(signal.SIGKILL)
    second.send_signal(signal.SIGCONT)
    training.finish(within_s=120)
    joining.finish(within_s=60)
    assert (training.code, joining.code) == (0, 0)
    killed = f"worker 0 (process {first.pid}) was killed by SIGKILL; the others go on"
    assert killed in training.errors
    assert "2 workers go on from step" in training.errors + joining.errors
    report = json.loads((run_dir / "report.json").read_text())
    assert report["num_steps"] == 45
    assert [record["step"] for record in read_metrics(run_dir)][-1] == 45
    assert not (run_dir / "last_state" / "store.json").exists()
    assert main(["join", str(run_dir)]) == 2


@pytest.mark.slow
@pytest.mark.process
def test_one_worker_is_asked_to_end(tmp_path: Path) -> None:
    """All end after the same step; the launcher, which got no signal, says so by its code."""
    run_dir = tmp_path / "run"
    training = start(run_dir, epochs=200)
    training.workers()[1].send_signal(signal.SIGTERM)
    training.finish(within_s=60)
    assert training.code == 128 + signal.SIGTERM
    assert "the others go on" not in training.errors
    assert list((run_dir / "checkpoints").glob("step-*"))
    resume = f"allstep train --resume {run_dir} --workers 2 --elastic"
    assert resume in " ".join(training.output.split())


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_where_only_workers_that_joined_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They stop after their step, with a checkpoint, and `allstep why` names the signal."""
    run_dir = tmp_path / "run"
    training = start(run_dir, epochs=200)
    joining = Launched("-m", "allstep", "join", run_dir)
    joining.wait_until(lambda: len(read_states(run_dir)) == 3)  # it has the training's state
    for worker in training.workers():
        worker.send_signal(signal.SIGKILL)
    training.wait_until(lambda: not any(map(is_running, training.workers())))
    training.process.send_signal(signal.SIGINT)
    training.finish(within_s=120)
    joining.finish(within_s=120)
    assert (training.code, joining.code) == (128 + signal.SIGINT, 128 + signal.SIGINT)
    assert list((run_dir / "checkpoints").glob("step-*"))
    assert "the run was interrupted; continue it with" in " ".join(joining.output.split())
    capsys.readouterr()
    assert main(["why", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["what"] == "signalled"


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("digits", "--workers", "2", "--min-workers", "3"), "`min_workers` (=3) exceeds"),
        (("digits", "--workers", "2", "--min-workers", "0"), "`min_workers` (=0)"),
        (("digits", "--compression", "fp16"), "`compression` (='fp16') can't be elastic"),
        (("digits", "--staleness", "1"), "`staleness` (=1) can't be elastic"),
        (("cots", "--workers", "2"), "cots divides its model"),
    ],
)
@pytest.mark.usefixtures("in_empty_folder")
def test_flags_that_cannot_be_elastic(
    arguments: tuple[str, ...], words: str, refused: Callable[..., str]
) -> None:
    assert words in refused("train", *arguments, "--elastic")
    assert not Path("runs").exists()


@pytest.mark.usefixtures("in_empty_folder")
def test_min_workers_of_a_run_that_is_not_elastic(refused: Callable[..., str]) -> None:
    words = "`min_workers` (=2) needs `--elastic`"
    assert words in refused("train", "digits", "--workers", "2", "--min-workers", "2")
    assert not Path("runs").exists()


@pytest.mark.usefixtures("in_empty_folder")
def test_launchers_that_end_all(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "torchrun has started them" in refused("train", "digits", "--elastic")


def test_where_workers_join_is_kept_while_the_launcher_is_there(tmp_path: Path) -> None:
    with keeping_store(tmp_path, StoreRecord(port=1234, min_workers=3)):
        assert read_store(tmp_path) == StoreRecord(port=1234, min_workers=3)
    with pytest.raises(UsageError, match="takes no workers now"):
        read_store(tmp_path)


def test_joining_what_takes_no_workers(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "has no recipe.json" in refused("join", str(tmp_path))
    assert "is no folder" in refused("join", str(tmp_path / "none"))
