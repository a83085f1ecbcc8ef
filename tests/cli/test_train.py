"""Whole runs by the command line: train, resume, evaluate, and what ends them early."""

import json
import shutil
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from allstep.cli.exits import read_exits
from allstep.cli.main import main
from allstep.cli.why import find_cause
from allstep.comm import read_states
from tests.helpers.launched import Launched
from tests.helpers.ports import free_port

pytestmark = pytest.mark.process

STOP_S = 20.0  # less than what hangs on purpose, or is given time to end, takes
RUN_S = 200.0
SHORT = ["--epochs", "1", "--warmup-epochs", "0"]
LONG = ["--epochs", "12", "--log-every-steps", "1", "--width", "8"]
NUM_LONG_STEPS = 12 * 15


class Command(Launched):
    """`allstep *arguments` in a folder of its own."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        super().__init__("-m", "allstep", *arguments, cwd=folder)
        self.folder = folder

    def to_the_end(self) -> str:
        self.finish(within_s=RUN_S)
        assert self.code == 0, self.errors
        return self.output

    def has_torch(self) -> bool:
        files = psutil.Process(self.process.pid).memory_maps()
        return any("libtorch" in file.path for file in files)

    def trains(self) -> bool:
        files = list(self.folder.glob("run/metrics.jsonl"))
        return bool(files) and files[0].read_text().count("\n") > 3


def report(run_dir: Path) -> dict:
    return json.loads((run_dir / "report.json").read_text())


@pytest.fixture(scope="module")
def short_run(tmp_path_factory) -> tuple[Path, str]:
    """A finished run on two workers, and what it printed."""
    folder = tmp_path_factory.mktemp("short")
    output = Command(folder, "train", "digits", "--workers", 2, *SHORT).to_the_end()
    (run_dir,) = (folder / "runs").iterdir()
    return run_dir, output


def test_a_run_on_two_workers_and_its_evaluation_on_one_and_two(short_run, capfd):
    run_dir, output = short_run
    assert run_dir.name.startswith("digits-2")
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        *(".lock", "recipe.json", "report.json", "metrics.jsonl", "tensorboard", "checkpoints"),
        *(".launcher.lock", "last_state", "metrics.csv"),
    }
    labels = [line.partition(": ")[0] for line in output.splitlines()]
    assert labels == ["accuracy", "loss", "speed", "MFU", "waiting", "checkpoint", "run", "next"]
    numbers = report(run_dir)
    assert numbers["workers"] == 2
    assert numbers["num_steps"] == 15
    assert 0 < numbers["mfu"] < 1
    assert numbers["interrupted"] is None
    assert json.loads((run_dir / "recipe.json").read_text())["fields"]["epochs"] == 1

    correct, count = (int(number) for number in numbers["totals"]["accuracy"])
    assert count == 360
    assert main(["evaluate", str(run_dir)]) == 0
    lines = capfd.readouterr().out.splitlines()
    accuracy = next(line for line in lines if line.startswith("accuracy"))
    assert f"({correct} of {count})" in accuracy
    assert main(["evaluate", str(run_dir), "--workers", "2"]) == 0
    assert accuracy in capfd.readouterr().out.splitlines()


@pytest.mark.slow
def test_shares_are_of_the_workers_that_there_are(tmp_path, capfd):
    """A run that was cut for two goes on, and is evaluated, on any number."""
    run_dir = str(tmp_path / "run")
    flags = ["--workers", "2", "--shares", "3,1", "--run-dir", run_dir]
    training = Command(tmp_path, "train", "digits", *flags, *LONG)
    training.wait_until(training.trains)
    training.process.send_signal(signal.SIGTERM)
    training.finish(within_s=RUN_S)
    assert main(["evaluate", run_dir]) == 0
    assert main(["train", "--resume", run_dir]) == 0
    said = capfd.readouterr().out
    assert said.count("`shares` (=3,1) are not of 1 workers: they get equal ones") == 2
    assert report(tmp_path / "run")["num_steps"] == NUM_LONG_STEPS


def test_an_agent_that_starts_its_workers_again(tmp_path, monkeypatch):
    """As torchrun's does when a node joins, which is no retry: the run that it began goes on."""
    environment = {
        **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        **{"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "0"},
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Command(tmp_path, "train", "digits", *SHORT).to_the_end()
    assert "is continued" in Command(tmp_path, "train", "digits", *SHORT).to_the_end()
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_run_stops_early_and_its_best_checkpoint_is_evaluated(tmp_path, capsys):
    """A metric whose least gain is out of reach: the first evaluation stays the last gain."""
    follow = ["--best-metric", "accuracy", "--best-mode", "max", "--min-delta", "1"]
    run_dir = str(tmp_path / "run")
    assert main(["train", "digits", "--run-dir", run_dir, *LONG, *follow, "--patience", "1"]) == 0
    output = capsys.readouterr().out
    numbers = report(tmp_path / "run")
    assert (numbers["num_epochs"], numbers["stopped_early"]) == (2, True)
    assert f"best: {numbers['best_value']:.4f} at step {numbers['best_step']}: {run_dir}" in output
    # As of a run that was killed before its first other checkpoint, and while it wrote this one.
    checkpoints = tmp_path / "run" / "checkpoints"
    for path in checkpoints.glob("step-*"):
        shutil.rmtree(path)
    (checkpoints / "best").rename(checkpoints / ".old-best")
    assert main(["evaluate", run_dir, "--checkpoint", "best"]) == 0
    said = capsys.readouterr().out
    assert f"{run_dir}, step {numbers['best_step']}\n" in said
    assert f"accuracy  {numbers['best_value']:.6g}" in said


def test_summary_of_a_run_whose_loss_is_no_number(tmp_path, capsys):
    flags = ("--nonfinite", "propagate", "--lr", "1e30", "--epochs", "1")
    assert main(["train", "digits", "--run-dir", str(tmp_path / "run"), *flags]) == 0
    assert "\nloss: nan\n" in capsys.readouterr().out


@pytest.mark.slow
def test_workers_of_torchrun_join(tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = Launched("-m", *torchrun, "-m", "allstep", "train", "digits", *SHORT, cwd=tmp_path)
    run.finish(within_s=RUN_S)
    assert run.code == 0, run.errors
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert report(run_dir)["workers"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "num_workers", "num_resumed"),
    [(signal.SIGINT, 2, 1), pytest.param(signal.SIGTERM, 1, 2, marks=pytest.mark.long)],
)
def test_an_interrupted_run_continues_on_other_workers(tmp_path, number, num_workers, num_resumed):
    run = Command(tmp_path, "train", "digits", "--run-dir", "run", "--workers", num_workers, *LONG)
    run.wait_until(run.trains)
    run.process.send_signal(number)
    run.finish(within_s=2 * STOP_S)
    assert run.code == 128 + number
    assert "Traceback" not in run.errors
    assert "the run was interrupted; continue it with `allstep train --resume run" in run.output
    numbers = report(tmp_path / "run")
    assert numbers["interrupted"] == number
    assert 0 < numbers["num_steps"] < NUM_LONG_STEPS
    assert Path(tmp_path, numbers["checkpoint"]).name == f"step-{numbers['num_steps']:08d}"
    found = find_cause(read_states(tmp_path / "run"), read_exits(tmp_path / "run"))
    assert (found.what, signal.Signals(number).name in found.words) == ("signalled", True)

    Command(tmp_path, "train", "--resume", "run", "--workers", num_resumed).to_the_end()
    numbers = report(tmp_path / "run")
    assert numbers["interrupted"] is None
    assert numbers["num_steps"] == NUM_LONG_STEPS


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_which_says_how_to_continue(tmp_path):
    run = Command(tmp_path, "train", "digits", "--run-dir", "run", "--workers", 2, *LONG)
    checkpoints = tmp_path / "run" / "checkpoints"
    run.wait_until(lambda: run.trains() and len(list(checkpoints.glob("step-*"))) > 0)
    run.workers()[1].kill()
    run.finish(within_s=STOP_S)
    assert run.code == 1
    assert run.errors.splitlines()[-3:] == [
        "error: worker 1 was killed by SIGKILL (out of memory?)",
        "What happened first: allstep why run",
        "The run can be continued: allstep train --resume run --workers 2",
    ]
    found = find_cause(read_states(tmp_path / "run"), read_exits(tmp_path / "run"))
    assert (found.what, found.rank) == ("killed", 1)
    assert "was killed by SIGKILL, last seen in " in found.words
    Command(tmp_path, "train", "--resume", "run").to_the_end()
    assert report(tmp_path / "run")["num_steps"] == NUM_LONG_STEPS


@pytest.mark.slow
def test_a_killed_worker_of_torchrun_is_named_and_the_other_says_how_to_continue(tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "allstep"]
    train = ["train", "digits", "--run-dir", "run", *LONG]
    run = Launched("-m", *torchrun, *train, cwd=tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    run.wait_until(lambda: len(list(checkpoints.glob("step-*"))) > 0)
    killed = run.workers()[0]
    killed.kill()
    run.finish(within_s=STOP_S)
    assert run.code == 1
    assert "[rank 1] " in run.errors
    assert f"rank 0 (process {killed.pid} on {socket.gethostname()})" in run.errors
    assert "\nThe run can be continued: allstep train --resume run (with torchrun," in run.errors
    found = find_cause(read_states(tmp_path / "run"), read_exits(tmp_path / "run"))
    assert (found.what, found.rank) == ("killed", 0)
    assert "is gone without a word" in found.words


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_or_after_its_last_step(
    tmp_path, short_run
):
    (tmp_path / "run").mkdir()
    shutil.copy(short_run[0] / "recipe.json", tmp_path / "run")
    output = Command(tmp_path, "train", "--resume", "run").to_the_end()
    assert output.startswith("run has no checkpoint: training starts at its first step\n")
    assert report(tmp_path / "run")["num_steps"] == 15

    (tmp_path / "run" / "report.json").unlink()
    again = Command(tmp_path, "train", "--resume", "run").to_the_end()
    labels = [line.partition(": ")[0] for line in again.splitlines()]
    assert labels == ["accuracy", "loss", "checkpoint", "run", "next"]
    assert again.splitlines()[0] == output.splitlines()[1]
    assert "next: the run is done; too few steps were left" in again


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path, short_run):
    shutil.copytree(short_run[0], tmp_path / "run")
    path = tmp_path / "run" / "recipe.json"
    plain = json.loads(path.read_text())
    changed = {"width": 8, "epochs": 2}  # another model, and an epoch left to train it
    path.write_text(json.dumps({**plain, "fields": {**plain["fields"], **changed}}))
    for num_workers in (1, 2):
        run = Command(tmp_path, "train", "--resume", "run", "--workers", num_workers)
        run.finish(within_s=RUN_S)
        assert run.code == 2
        assert "features.0.weight" in run.errors
        assert run.errors.count("error: ") == 1
        assert "Traceback" not in run.errors


@pytest.mark.parametrize(
    ("num_workers", "delay_s"),
    [
        (1, 0.0),
        (2, 0.03),  # Python starts in 0.05 s
        (2, 1.0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 1.0), (2, 0.02), (2, 0.04))),
    ],
)
def test_a_signal_before_the_first_step_ends_at_once(tmp_path, num_workers, delay_s):
    run = Command(tmp_path, "train", "digits", "--workers", num_workers, *LONG)
    run.wait_until(run.workers if num_workers > 1 else run.has_torch)
    time.sleep(delay_s)
    run.process.send_signal(signal.SIGINT)
    run.finish(within_s=STOP_S)
    assert run.code == 128 + signal.SIGINT
    assert "Traceback" not in run.errors
