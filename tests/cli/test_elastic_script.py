"""`allstep launch --elastic` and `allstep join` with a script of a user's own."""

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from allstep.cli.exits import read_exits, read_store
from allstep.cli.main import main
from tests.helpers import elastic_script
from tests.helpers.compare import differing_names
from tests.helpers.joiners import num_joiners
from tests.helpers.launched import Launched

SCRIPT = Path(elastic_script.__file__)


@pytest.mark.process
@pytest.mark.long
def test_a_worker_is_lost_and_another_joins(tmp_path: Path, refused: Callable[..., str]) -> None:
    run_dir = tmp_path / "run"
    script = shutil.copy(SCRIPT, tmp_path / "train.py")
    given = ("--", script, tmp_path, 5, 3)
    flags = ("--elastic", "--workers", 2, "--run-dir", run_dir)
    launched = Launched("-m", "allstep", "launch", *flags, *given)
    launched.wait_until(lambda: len(list(tmp_path.glob("held-*"))) == 2)
    first, _ = launched.workers()
    text = script.read_text()
    script.write_text(text.replace("lr=0.1", "lr=0.2"))
    edited = Launched("-m", "allstep", "join", run_dir, cwd=tmp_path)
    edited.finish(within_s=200)
    assert edited.code == 1
    assert "This worker can't join: it has script " in edited.errors
    script.write_text(text)
    joining = Launched("-m", "allstep", "join", run_dir, cwd=tmp_path)
    joining.wait_until(lambda: num_joiners(read_store(run_dir).reachable_address()) == 1)
    first.send_signal(signal.SIGKILL)
    (tmp_path / "goes_on-5").touch()
    launched.finish(within_s=200)
    joining.finish(within_s=200)
    assert (launched.code, joining.code) == (0, 0), launched.errors + joining.errors
    killed = f"worker 0 (process {first.pid}) was killed by SIGKILL; the others go on"
    assert killed in launched.errors
    assert "2 workers go on from step 6" in launched.errors + joining.errors
    alone = tmp_path / "alone"
    alone.mkdir()
    elastic_script.main(alone, [], 3)
    (expected,) = (torch.load(file) for file in alone.glob("model-*"))
    results = [torch.load(file) for file in tmp_path.glob("model-*")]
    assert len(results) == 2
    for result in results:
        assert differing_names(result, expected) == []
    assert "takes no workers now" in refused("join", str(run_dir))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("fails", ["rank 0", "all"])
def test_a_script_that_fails_behind_the_training(fails: str, tmp_path: Path) -> None:
    """Nobody does what it has still to do: the launcher exits with its code."""
    flags = ("--elastic", "--workers", 2, "--run-dir", tmp_path / "run")
    launched = Launched("-m", "allstep", "launch", *flags, "--", SCRIPT, tmp_path, 100, 1, fails)
    launched.finish(within_s=200)
    assert launched.code == 1
    assert "OSError: no room for the model" in launched.errors
    assert "the others go on" not in launched.errors
    exits = read_exits(tmp_path / "run")
    assert exits is not None
    assert exits.codes[exits.first] == 1
    assert len(list(tmp_path.glob("model-*"))) == (1 if fails == "rank 0" else 0)


def on_another_host(line: list[str]) -> list[str]:
    """Where no process of this one is seen."""
    return ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *line]


@pytest.mark.process
@pytest.mark.slow
def test_the_only_worker_of_a_host_is_killed(tmp_path: Path) -> None:
    """The others learn it from its launcher: they don't wait until the timeout."""
    if subprocess.run(on_another_host(["true"])).returncode:
        pytest.skip("needs unshare, and the right to use it")
    run_dir = tmp_path / "run"
    flags = ("--elastic", "--workers", 1, "--run-dir", run_dir)
    launched = Launched("-m", "allstep", "launch", *flags, "--", SCRIPT, tmp_path, "2,5", 3)
    launched.wait_until(lambda: len(list(tmp_path.glob("held-2-*"))) == 1)
    joining = Launched("-m", "allstep", "join", run_dir, on=on_another_host)
    joining.wait_until(lambda: num_joiners(read_store(run_dir).reachable_address()) == 1)
    (tmp_path / "goes_on-2").touch()
    launched.wait_until(lambda: len(list(tmp_path.glob("held-5-*"))) == 2)
    family = psutil.Process(joining.process.pid).children(recursive=True)
    (killed,) = (process for process in family if str(SCRIPT) in process.cmdline())
    killed.kill()
    (tmp_path / "goes_on-5").touch()
    launched.finish(within_s=100)
    joining.finish(within_s=100)
    assert (launched.code, joining.code) == (0, 1), launched.errors + joining.errors
    assert "1 worker goes on from step 5" in launched.errors


@pytest.mark.process
@pytest.mark.slow
def test_a_launcher_that_is_killed_ends_its_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Soon: else they would train on and on."""
    flags = ("--elastic", "--workers", 2, "--run-dir", "run")
    given = (*flags, "--", SCRIPT, tmp_path, 5, 1_000_000)
    launched = Launched("-m", "allstep", "launch", *given, cwd=tmp_path)
    launched.wait_until(lambda: len(list(tmp_path.glob("held-*"))) == 2)
    workers = launched.workers()
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    assert "own script" in capsys.readouterr().out
    launched.process.kill()
    launched.process.wait()
    (tmp_path / "goes_on-5").touch()
    for worker in workers:
        worker.wait(timeout=200)
    assert not list(tmp_path.glob("model-*"))
    assert "The launcher of this worker has ended" in launched.process.communicate()[1]
    assert main(["why", str(tmp_path / "run")]) == 0
    assert "The store in which workers find each other is gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--elastic", "--workers", "2"], "allstep launch --elastic --workers 2 -- script.py"),
        (["--hosts", "a,b"], "allstep launch --hosts alpha:2,beta:1 -- script.py"),
        (["--elastic", "--workers", "2", "--min-workers", "3", "--", "s.py"], "`min_workers` (=3)"),
        (["--elastic", "--workers", "0", "--", "-m", "s"], "`workers` (=0) must be at least 1"),
        (["--elastic", "--workers", "2", "--", "s.py"], "`script` (='s.py') is no file in /"),
        (["--hosts", "a,b", "--elastic", "--", "s.py"], "leave out `--hosts`"),
    ],
)
def test_flags_that_cannot_be_meant(
    flags: list[str], words: str, refused: Callable[..., str]
) -> None:
    assert words in refused("launch", *flags)


def test_a_folder_that_does_not_take_the_command(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    """As on a full disk."""
    run_dir = tmp_path / "run"
    (run_dir / "script.json").mkdir(parents=True)
    flags = ("--elastic", "--workers", "2", "--run-dir", str(run_dir))
    message = refused("launch", *flags, "--", str(SCRIPT))
    assert message.startswith(f"error: `run_dir` (={run_dir}) can't be written (Is a directory)")


def test_a_folder_of_a_recipe(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "recipe.json").touch()
    flags = ("--elastic", "--workers", "2", "--run-dir", str(tmp_path), "--", "-m", "s")
    assert "holds a recipe's run" in refused("launch", *flags)
