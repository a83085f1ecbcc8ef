"""`allstep train fashion --parameter-server`: what it learns, what it leaves, what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import allstep
from allstep import Communicator, UsageError
from allstep.cli.main import main
from allstep.recipes import asynchronous
from allstep.recipes.asynchronous import Server
from allstep.recipes.digits import Digits
from allstep.recipes.fashion import Fashion
from tests.helpers.compare import state_difference
from tests.helpers.generators import thread_generators  # noqa: F401
from tests.helpers.ranks import run_ranks
from tests.helpers.small_recipes import write_clothes

State = dict[str, Tensor]


def train(recipe: Digits, server: Server, run_dir: Path, num_workers: int) -> list[State]:
    """What each worker's model is at the end."""
    run_dir.mkdir()

    def work(comm: Communicator) -> State:
        return asynchronous.train(recipe, server, comm, run_dir).state_dict()

    return run_ranks(num_workers, work)


def test_one_worker_makes_the_updates_of_fit(tmp_path: Path) -> None:
    """The same samples, rates and dropout masks; the control has another order of samples."""
    recipe = Digits(epochs=1, width=8, compression="fp32")
    [state] = train(recipe, "plain", tmp_path / "server", 1)

    def work(comm: Communicator) -> State:
        task = recipe.task(comm)
        allstep.fit(task, recipe, comm, tmp_path / "fit")
        return task.model.state_dict()

    [expected] = run_ranks(1, work)
    assert state_difference(state, expected) < 1e-5
    [other] = train(Digits(epochs=1, width=8, seed=1), "plain", tmp_path / "other", 1)
    assert state_difference(state, other) > 1e-2


def test_workers_in_turn_learn_from_no_late_gradient(
    thread_generators: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    recipe = Digits(epochs=3, width=8)
    states = train(recipe, "in_turn", tmp_path / "run", 2)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["staleness"] == {"0": 2 * report["num_steps"]}  # of two servers
    assert report["num_steps"] == 2 * 3 * recipe.steps_per_epoch(719)  # of 1,437 in two parts
    assert report["metrics"]["accuracy"] > 0.6
    written = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    again = train(recipe, "in_turn", tmp_path / "again", 2)
    for state in (*states, *again):
        assert state_difference(state, written) == 0


def test_workers_that_do_not_wait_make_as_many_updates(
    thread_generators: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    recipe = Digits(epochs=1, width=4)
    for server in ("plain", "staleness_aware"):
        train(recipe, server, tmp_path / server, 3)
        report = json.loads((tmp_path / server / "report.json").read_text())
        assert sum(report["staleness"].values()) == 3 * report["num_steps"]
        assert report["num_steps"] == 3 * recipe.steps_per_epoch(479)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 1.0}, "`clip_norm` (=1.0) does nothing with a parameter server"),
        ({"precision": "bfloat16"}, "`precision` (='bfloat16') does nothing"),
        ({"checkpoint_every_steps": 10}, "`checkpoint_every_steps` (=10) does nothing"),
        ({"staleness": 1}, "`staleness` (=1) does nothing"),
        ({"compression": "int8"}, "gradients travel to a parameter server as they are"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        Fashion(parameter_server="plain", **options)
    assert message in str(refused.value)
    Fashion(**options)  # the control


def test_flag_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--folder", str(write_clothes(tmp_path / "clothes")), "--epochs", "1"]
    flags += ["--global-batch", "10", "--micro-batch", "5", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "fashion", *flags, "--parameter-server", "plain"]) == 0
    printed = capsys.readouterr().out
    assert "updates: 2 by 1 workers, on average 0.00 late" in printed
    assert str(tmp_path / "run") in printed
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "finished at step 2, after 1 epochs" in told and "evaluate" not in told


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "--elastic", "--workers", "2"], "`elastic`: fashion has a parameter server"),
        (["train", "--large-batch", "lars_32k"], "has a parameter server"),
        (["curve"], "has a parameter server"),
        (["sweep"], "has a parameter server"),
        (["advise"], "has a parameter server"),
    ],
)
def test_commands_that_need_equal_steps_refuse_it(
    command: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *flags = command
    folder = write_clothes(tmp_path / "clothes")
    words = [name, "fashion", "--folder", str(folder), "--parameter-server", "plain", *flags]
    assert main(words) == 2
    assert message in capsys.readouterr().err
