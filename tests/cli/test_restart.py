"""Runs that go on by themselves: `--resume auto`, and torchrun's restarts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from allstep.cli import run_folder
from allstep.cli.main import main
from allstep.cli.train import read_command_line
from tests.helpers.launched import Launched

SHORT = ["--epochs", "1", "--warmup-epochs", "0"]
LONG = ["--epochs", "8", "--log-every-steps", "1", "--width", "8"]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run that says it has come to its end."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    _, recipe = read_command_line("digits", *SHORT)
    run_folder.write_recipe(run_dir, recipe)
    report = {"interrupted": None, "num_epochs": 1, "num_steps": 15}
    (run_dir / "report.json").write_text(json.dumps(report))
    return run_dir


def train(run_dir: Path, *flags: str) -> list[str]:
    return ["train", "digits", "--run-dir", str(run_dir), "--resume", "auto", *flags]


def test_a_finished_run_is_not_trained_again(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train(finished, *SHORT)) == 0
    printed = capsys.readouterr().out
    assert f"{finished} is continued" in printed
    assert f"{finished} finished at step 15" in printed


def test_another_training_in_the_folder_is_refused(
    finished: Path, refused: Callable[..., str]
) -> None:
    message = refused(*train(finished, "--epochs", "2", "--warmup-epochs", "0"))
    assert "holds another training (epochs 1, not 2)" in message
    message = refused("train", "fashion", *train(finished)[2:])
    assert "holds another training (recipe digits, not fashion)" in message


def test_a_restart_finds_the_run_of_its_own_agent_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, str(value))
    _, recipe = read_command_line("digits", *SHORT)
    monkeypatch.chdir(tmp_path)
    made = run_folder.make_run_dir("digits", None)
    assert run_folder.find_run(recipe, None) is None  # no recipe was written yet
    run_folder.write_recipe(made, recipe)
    assert run_folder.find_run(recipe, None) == made
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    assert run_folder.find_run(recipe, None) is None


def test_a_restart_does_not_go_on_with_a_run_that_another_launch_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recipe = read_command_line("digits", *SHORT)
    folder = run_folder.make_run_dir("digits", tmp_path / "run")
    run_folder.write_recipe(folder, recipe)
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, str(value))
    assert run_folder.find_run(recipe, folder, of_any_launch=False) is None
    assert run_folder.find_run(recipe, folder) == folder  # as `--resume auto` asks for
    own = run_folder.make_run_dir("digits", tmp_path / "own")
    run_folder.write_recipe(own, recipe)
    assert run_folder.find_run(recipe, own, of_any_launch=False) == own


def test_auto_needs_a_recipe_and_a_folder(refused: Callable[..., str]) -> None:
    assert "give `--run-dir DIR`" in refused("train", "digits", "--resume", "auto")
    assert "needs a recipe" in refused("train", "--resume", "auto")
    for words in (("--resume", "auto", "digits"), ("--run-dir", "x", "--resume=auto", "digits")):
        assert "first the recipe: allstep train digits --run-dir" in refused("train", *words)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "flags", [[], pytest.param(["--run-dir", "runs/run"], marks=pytest.mark.long)]
)
def test_torchrun_goes_on_after_a_worker_was_killed(tmp_path: Path, flags: list[str]) -> None:
    agent = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    agent += ["--max-restarts", "3", "-m", "allstep"]
    run = Launched("-m", *agent, "train", "digits", *flags, *LONG, cwd=tmp_path)
    run.wait_until(lambda: bool(list(tmp_path.glob("runs/*/checkpoints/step-*"))))
    run.workers()[1].kill()
    run.finish(within_s=300)
    assert run.code == 0, run.errors
    [run_dir] = (tmp_path / "runs").iterdir()
    assert f"runs/{run_dir.name} is continued" in run.output
    report = json.loads((run_dir / "report.json").read_text())
    assert report["num_steps"] == 8 * 15 and report["interrupted"] is None


@pytest.mark.process
@pytest.mark.slow
def test_auto_begins_where_there_is_no_run(tmp_path: Path) -> None:
    run = Launched("-m", "allstep", *train(tmp_path / "new", *SHORT), cwd=tmp_path)
    run.finish(within_s=200)
    assert run.code == 0, run.errors
    assert "is continued" not in run.output
    assert json.loads((tmp_path / "new" / "report.json").read_text())["num_steps"] == 15


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_restarts_by_the_command_itself(num_workers: int, tmp_path: Path) -> None:
    """A worker is killed twice, one time more than may be: the second ends the run."""
    run_dir = tmp_path / "run"
    flags = ["--run-dir", run_dir, "--epochs", 40, "--restarts", 1, "--workers", num_workers]
    training = Launched("-m", "allstep", "train", "digits", *flags)

    def has_begun(lines: int) -> bool:
        file = run_dir / "metrics.jsonl"
        num_lines = len(file.read_text().splitlines()) if file.exists() else 0
        return num_lines > lines and any((run_dir / "checkpoints").glob("step-*"))

    training.wait_until(lambda: has_begun(0))
    first = training.workers()
    first[-1].kill()
    training.wait_until(lambda: bool(set(training.workers()) - set(first)))
    written = len((run_dir / "metrics.jsonl").read_text().splitlines())
    training.wait_until(lambda: has_begun(written))
    next(iter(set(training.workers()) - set(first))).kill()
    training.finish(within_s=60)
    assert training.code == 1
    assert f"{run_dir} is continued: restart 1 of 1" in training.output
    assert training.errors.count("was killed by SIGKILL") == 2
    assert "The run can be continued" in training.errors


def test_restarts_that_cannot_be(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "`restarts` (=-1)" in refused("train", "digits", "--restarts", "-1", "--workers", "1")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "`--max-restarts`" in refused("train", "digits", "--restarts", "1")
