"""`allstep train --elastic` and `allstep join`."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from allstep.cli import run_folder
from allstep.cli.exits import StoreRecord, forget_exits, keeping_store, read_store
from allstep.cli.main import main
from allstep.comm import read_states
from allstep.errors import UsageError
from allstep.recipes.digits import Digits
from allstep.train import read_checkpoint
from allstep.train.metrics import read_metrics
from tests.helpers.compare import differing_names
from tests.helpers.elastic_runs import log_of
from tests.helpers.joiners import answers, num_joiners
from tests.helpers.launched import Launched
from tests.helpers.named_hosts import named_hosts
from tests.helpers.ports import free_port


def start(
    run_dir: Path, *flags: object, epochs: int, on: Callable[[list[str]], list[str]] = list
) -> Launched:
    """`digits` on two workers, which have made some steps."""
    flags = ("--workers", 2, "--elastic", "--run-dir", run_dir, "--epochs", epochs, *flags)
    training = Launched("-m", "allstep", "train", "digits", *flags, on=on)
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
    joining.wait_until(lambda: num_joiners(read_store(run_dir).reachable_address()) == 1)
    first.send_signal(signal.SIGKILL)
    second.send_signal(signal.SIGCONT)
    training.finish(within_s=120)
    joining.finish(within_s=200)
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
def test_launcher_and_store_are_lost_where_the_store_is_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process's end ends the run: workers that have joined bring it to its end."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # on which the bits depend
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    store, address = served()
    undisturbed = start(alone, "--store", address, "--workers", 1, epochs=20)
    undisturbed.finish(within_s=400)  # the next run is another one in the same store
    training = start(run_dir, "--store", address, epochs=20)
    second = training.workers()[1]
    second.send_signal(signal.SIGSTOP)  # all wait until the other has come
    joining = Launched("-m", "allstep", "join", run_dir)
    joining.wait_until(lambda: num_joiners(read_store(run_dir).reachable_address()) == 1)
    second.send_signal(signal.SIGCONT)
    joining.wait_until(lambda: [state.size for state in read_states(run_dir)] == [3] * 3)
    third = joining.workers()[0]
    third.send_signal(signal.SIGSTOP)  # the others wait for it, too
    training.process.send_signal(signal.SIGKILL)
    training.finish(within_s=60)
    last = Launched("-m", "allstep", "join", run_dir)  # without a launcher that serves it
    last.wait_until(lambda: num_joiners(read_store(run_dir).reachable_address()) == 2)
    third.send_signal(signal.SIGCONT)
    last.wait_until(lambda: [state.size for state in read_states(run_dir)][:2] == [2] * 2)
    store.process.send_signal(signal.SIGKILL)
    store.finish(within_s=60)
    for launched in (joining, last):
        launched.finish(within_s=400)
        assert launched.code == 0, launched.errors
    assert "the store in which workers find each other is gone" in joining.errors
    assert log_of(run_dir) == log_of(alone)
    models = [
        read_checkpoint(x / "checkpoints" / "step-00000300")["model"] for x in (run_dir, alone)
    ]
    assert differing_names(*models) == []


_FIREWALL = """table inet firewall {{
    chain incoming {{
        type filter hook input priority 0; iifname "eth0" ct state new drop;
    }}
    chain outgoing {{
        type filter hook output priority 0;
        oifname "eth0" tcp dport != {port} ct state new drop;
    }}
}}"""


@pytest.mark.slow
@pytest.mark.net
def test_worker_behind_a_firewall_joins(tmp_path: Path) -> None:
    """It reaches the store alone, and doesn't hold up the others for ever."""
    if shutil.which("nft") is None:
        pytest.skip("needs nft: apt-get install nftables")
    run_dir = tmp_path / "run"
    with named_hosts(2) as hosts:
        training = start(run_dir, epochs=2_000, on=partial(hosts.line, 0))
        rules = _FIREWALL.format(port=read_store(run_dir).port)
        namespace = hosts.namespaces[1]
        nft = ["ip", "netns", "exec", namespace, "nft", "-f", "-"]
        subprocess.run(nft, input=rules, text=True, check=True)
        joining = Launched("-m", "allstep", "join", run_dir, on=partial(hosts.line, 1))
        joining.finish(within_s=280)
        assert "could not connect with the other workers" in joining.errors
        num_lines = len(read_metrics(run_dir))
        training.wait_until(lambda: len(read_metrics(run_dir)) > num_lines)
        training.process.send_signal(signal.SIGTERM)
        training.finish(within_s=60)
    assert training.code == 128 + signal.SIGTERM


def served() -> tuple[Launched, str]:
    """An `allstep store`, and its address."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    store = Launched("-m", "allstep", "store", "--port", port)
    store.wait_until(lambda: answers(address))
    return store, address


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.process
def test_ctrl_c_where_only_workers_that_joined_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They stop after their step, with a checkpoint, and `allstep why` names the signal."""
    run_dir = tmp_path / "run"
    training = start(run_dir, epochs=200)
    joining = Launched("-m", "allstep", "join", run_dir)
    joining.wait_until(
        lambda: [state.size for state in read_states(run_dir)] == [3] * 3
    )  # it has the training's state
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


@pytest.mark.parametrize(
    ("launch", "num_workers", "flags"),
    [
        ({}, 1, ""),
        ({}, 2, " --workers 2"),
        ({"restarts": 3}, 2, " --workers 2 --restarts 3"),
        ({"elastic": True}, 1, " --elastic"),
        (
            {"elastic": True, "min_workers": 2, "restarts": 1},
            1,  # is left, too few to go on with
            " --workers 2 --elastic --min-workers 2 --restarts 1",
        ),
    ],
)
def test_the_command_that_continues_a_run_has_the_flags_of_its_launch(
    launch: dict[str, Any], num_workers: int, flags: str, tmp_path: Path
) -> None:
    recipe = Digits(lr=0.1)
    run_folder.write_recipe(tmp_path, recipe)
    run_folder.note_launch(tmp_path, elastic=True, min_workers=5)  # of an earlier part
    run_folder.note_launch(tmp_path, **launch)
    expected = f"allstep train --resume {tmp_path}{flags}"
    assert run_folder.resume_command(tmp_path, num_workers) == expected
    assert run_folder.read_recipe(tmp_path, argument="run") == recipe


@pytest.mark.slow
@pytest.mark.process
def test_a_run_that_has_lost_all_its_workers_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With as many as were there last, and as it was launched; so does `allstep why`."""
    run_dir = tmp_path / "run"
    training = start(run_dir, "--min-workers", 2, epochs=200)
    joining = Launched("-m", "allstep", "join", run_dir)
    joining.wait_until(lambda: [state.size for state in read_states(run_dir)] == [3] * 3)
    for worker in [*training.workers(), *joining.workers()]:
        worker.send_signal(signal.SIGKILL)
    training.finish(within_s=120)
    joining.finish(within_s=120)
    command = f"allstep train --resume {run_dir} --workers 3 --elastic --min-workers 2"
    assert command in training.errors
    capsys.readouterr()
    assert main(["why", str(run_dir)]) == 0
    assert command in capsys.readouterr().out or not run_folder.has_checkpoint(run_dir)


def test_where_workers_join_is_kept_while_the_launcher_is_there(tmp_path: Path) -> None:
    record = StoreRecord(port=1234, job_id="job", min_workers=3)
    with keeping_store(tmp_path, record):
        assert read_store(tmp_path) == record
    with pytest.raises(UsageError, match="takes no workers now"):
        read_store(tmp_path)


def test_a_folder_that_does_not_take_the_place_to_join_at(tmp_path: Path) -> None:
    """As on a full disk."""
    (tmp_path / "last_state" / "store.json").mkdir(parents=True)
    record = StoreRecord(port=1, job_id="a", min_workers=1)
    keeping = keeping_store(tmp_path, record)
    with (
        pytest.raises(UsageError, match=r"`run_dir` .* can't be written \(Is a directory"),
        keeping,
    ):
        pass


def test_joining_where_the_launcher_was_killed(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Its record is there still, its lock is not."""
    run_folder.write_recipe(tmp_path, Digits())
    launcher = Launched("-c", _LAUNCHER, tmp_path)
    launcher.wait_until(lambda: (tmp_path / "last_state" / "store.json").exists())
    assert read_store(tmp_path).port == 9  # the control
    launcher.process.send_signal(signal.SIGKILL)
    launcher.finish(within_s=60)
    assert "was killed; `allstep why` says how" in refused("join", str(tmp_path))
    forget_exits(tmp_path)  # as the next launcher does
    assert "was started without `--elastic`" in refused("join", str(tmp_path))


_LAUNCHER = """
import pathlib, signal, sys
from allstep.cli.exits import StoreRecord, keeping_store
from allstep.train import launcher_lock
run_dir = pathlib.Path(sys.argv[1])
record = StoreRecord(port=9, job_id="job", min_workers=1)
with launcher_lock(run_dir), keeping_store(run_dir, record):
    signal.pause()
"""


def test_joining_what_takes_no_workers(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "has no recipe.json" in refused("join", str(tmp_path))
    assert "is no folder" in refused("join", str(tmp_path / "none"))
