"""`allstep advise SCRIPT`: how the script is run, what is said of it and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from allstep.cli.interruptible import SIGNALS
from allstep.cli.launch import Workers, launch_workers
from allstep.cli.main import main
from allstep.cli.script_worker import PROFILE, profile_path
from allstep.cli.worker import log_path
from allstep.doctor import ScriptProfile
from allstep.plan import Workload

LINK = ("--link", "10gbit", "--workers", "1,2,4")

pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.fixture
def asked():
    """What the script's worker was asked for."""
    return []


@pytest.fixture
def launch(asked):
    """Stands in for the worker of a script that goes well."""
    Path("train.py").touch()

    def launch(workers):
        assert (workers.num_workers, workers.function, workers.has_logs) == (1, PROFILE, True)
        asked.append(workers.arguments)
        micro = Workload.from_step(num_params=1010, step_s=0.1, num_samples=5)
        found = ScriptProfile(micro=micro, num_micro_batches=4, global_batch=20)
        profile_path(workers.folder).write_text(json.dumps(asdict(found)))
        return 0

    return launch


def test_a_script_is_advised_on(launch, asked, capsys):
    assert (
        main(["advise", "train.py", *LINK, "--epochs", "3", "--json", "out.json"], launch=launch)
        == 0
    )
    assert asked == [{"script": "train.py", "arguments": ["--epochs", "3"], "timeout_s": 300.0}]
    text = " ".join(capsys.readouterr().out.split())
    assert "1,010 parameters; 5 samples take" in text
    assert "Batch: 20." in text
    assert "advice: " in text
    found = json.loads(Path("out.json").read_text())
    assert (found["micro_batch"], found["global_batch"]) == (5, 20)
    lone = next(p for p in found["predictions"] if p["workers"] == 1)
    assert lone["compute_s"] == pytest.approx(0.4)


def test_what_is_behind_two_dashes_is_the_scripts(launch, asked, capsys):
    flags = ["--timeout-s", "9", "--x", "--", "--workers", "8", "--link", "a", "--", "-h"]
    assert main(["advise", "train.py", *LINK, *flags], launch=launch) == 0
    own = ["--x", "--workers", "8", "--link", "a", "--", "-h"]
    assert asked == [{"script": "train.py", "arguments": own, "timeout_s": 9.0}]
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("workers"))
    assert header.split() == ["workers", "1", "2", "4", "accuracy", "cost"]


def test_another_global_batch_may_be_asked_about(launch, asked, capsys):
    assert main(["advise", "train.py", *LINK, "--global-batch", "40"], launch=launch) == 0
    assert "Batch: 40." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no.py", *LINK), "`script` (=no.py) is no file."),
        (("no.py", "--params", "1M"), "`params` (=1M) is measured for a recipe or a script"),
        (("no.py", "--dtype", "x"), "behind `--`, `allstep advise no.py ... -- --dtype ...`"),
        (("no.py", "--micro-batch", "8"), "`micro_batch` (=8) is the script's own: leave"),
        (("no.py", "--micro-batch", "8"), "`allstep advise no.py ... -- --micro-batch 8`"),
        (("no.py", "--timeout-s", "0"), "`timeout_s` (=0.0) must be above 0."),
        (("train.py", *LINK, "--global-batch", "7"), "`global_batch` (=7) must be a multiple of"),
    ],
)
def test_a_script_that_cannot_be_asked_about(launch, refuse_advice, arguments, message):
    assert message in refuse_advice(*arguments, launch=launch)


# -- the worker ------------------------------------------------------------------------------------


def launching(do):
    """Stands in for the worker: `do(folder)` returns its exit code."""
    Path("train.py").touch()
    return lambda workers: do(workers.folder)


def test_a_script_that_fails_is_quoted(refuse_advice):
    def fail(folder):
        log_path(folder, 0).write_text("Traceback\n  somewhere\nKeyError: 'x'\n")
        return 3

    said = "`script` (=train.py) failed with exit code 3: KeyError: 'x' Run `python train.py` to"
    assert said in refuse_advice("train.py", *LINK, launch=launching(fail))


def test_a_mistake_is_said(refuse_advice):
    def leave(folder):
        profile_path(folder).write_text(json.dumps({"mistake": "never calls `allstep.attach`."}))
        return 0

    message = refuse_advice("train.py", *LINK, launch=launching(leave))
    assert "`script` (=train.py) never calls `allstep.attach`." in message


def test_a_signal_is_the_exit_code():
    folders = []

    def end(folder):
        folders.append(folder)
        return 128 + signal.SIGTERM

    with pytest.raises(SystemExit) as stop:
        main(["advise", "train.py", *LINK], launch=launching(end))
    assert stop.value.code == 143
    assert not folders[0].exists()


def test_a_terminal_shows_what_it_waits_for(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")

    def leave(folder):
        profile_path(folder).write_text(json.dumps({"mistake": "is short."}))
        return 0

    assert main(["advise", "train.py", *LINK], launch=launching(leave)) == 2
    assert "train.py on 1 worker, 11 steps" in capsys.readouterr().err


# -- in a process of its own -----------------------------------------------------------------------

SCRIPT = """
    import os, sys, time
    from pathlib import Path

    import torch
    import allstep

    Path("pid").write_text(str(os.getpid()))
    while "stuck" in sys.argv:
        time.sleep(0.1)
    comm = allstep.init(device="cpu")
    assert comm.size == 1 and not [name for name in os.environ if "RANK" in name]
    model = torch.nn.Linear(8, 2)
    exchange = allstep.attach(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.utils.data.TensorDataset(torch.ones(240, 8))
    loader = allstep.data.loader(samples, comm, global_batch=12, micro_batch=4)
    for batch in allstep.steps(loader, exchange):
        for (x,) in batch:
            batch.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    sys.exit("went on to its end")
"""
OF_A_LAUNCHER = {
    "torchrun": {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611",
        "TORCHELASTIC_RUN_ID": "7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    },
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_RANK": "0",
    },
}


def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    Path("train.py").write_text(dedent(SCRIPT))
    Path("tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "allstep", "advise", "train.py", *LINK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(Path("tmp").resolve()), **environ},
    )


def left_over() -> list[Path]:
    return list(Path("tmp").glob("allstep*"))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("launcher", OF_A_LAUNCHER)
def test_the_script_is_alone_whoever_started_advise(launcher):
    """It would wait for rank 1 otherwise, and there is none."""
    advise = start("--json", "out.json", **OF_A_LAUNCHER[launcher])
    out, err = advise.communicate(timeout=200)
    assert (advise.returncode, err) == (0, "")
    assert "advice: " in out
    found = json.loads(Path("out.json").read_text())
    assert (found["micro_batch"], found["global_batch"]) == (4, 12)
    assert left_over() == []


@pytest.mark.process
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_script_and_leaves_nothing(number):
    advise = start("--", "stuck")
    while not (Path("pid").exists() and Path("pid").read_text()):
        assert advise.poll() is None
        time.sleep(0.05)
    script = psutil.Process(int(Path("pid").read_text()))
    advise.send_signal(number)
    out, err = advise.communicate(timeout=200)
    assert (advise.returncode, out, err) == (128 + number, "", "")
    assert not script.is_running() or script.status() == psutil.STATUS_ZOMBIE
    assert left_over() == []


@pytest.mark.slow
@pytest.mark.process
def test_a_script_that_is_stuck_is_ended_and_shown():
    advise = start("--timeout-s", "1", "--", "stuck")
    out, err = advise.communicate(timeout=200)
    assert (advise.returncode, out) == (2, "")
    assert err.startswith("error: `script` (=train.py) made no forward and no step for 1 s. It was")
    assert "time.sleep(0.1)" in err
    assert "Give it more time with `--timeout-s`" in err
    assert left_over() == []


@pytest.mark.process
def test_signals_are_as_before_once_workers_have_ended(tmp_path):
    before = [signal.getsignal(number) for number in SIGNALS]
    assert launch_workers(Workers(1, "os.path:isfile", tmp_path, {})) == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before
