"""`allstep sweep`: what it refuses, its table, and that it goes on after any end."""

import csv
import json
import math
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from allstep.cli import output_files, sweep_output
from allstep.cli.main import main
from allstep.cli.sweep_output import ranked
from allstep.cli.sweep_plan import keep_plan, make_plan, read_axes
from allstep.cli.train import LaunchOptions
from allstep.cli.trainings import Outcome
from allstep.errors import UsageError
from tests.helpers.launched import Launched

RUN_S = 200.0
QUICK = ["--epochs", "1", "--width", "4", "--warmup-epochs", "0"]


def plan(*flags: str, folder: Path = Path("none")):
    return make_plan("digits", flags, folder)


# -- which trainings --------------------------------------------------------------------------


def test_a_sweep_has_all_combinations():
    found = plan("--lr", "0.1,0.2", "--optimizer=sgd,lamb", "--epochs", "3", "--shares", "3,1")
    names = [training.name for training in found]
    assert names == [f"lr={lr},optimizer={o}" for lr in ("0.1", "0.2") for o in ("sgd", "lamb")]
    for training in found:
        recipe, values = training.recipe, training.values
        assert (str(recipe.lr), recipe.optimizer) == (values["lr"], values["optimizer"])
        assert (recipe.epochs, recipe.shares) == (3, "3,1")
        assert training.run_dir == Path("none") / training.name


def test_a_published_recipe_is_a_value_like_any_other(capsys):
    found = plan("--large-batch", "lars_32k,lamb_fashion", "--global-batch", "960")
    assert [each.recipe.optimizer for each in found] == ["lars", "lamb"]
    assert capsys.readouterr().out == ""


def test_a_flag_without_a_value_is_there_or_not():
    found = plan("--drop-last", "true,false")
    assert {t.name: t.recipe.drop_last for t in found} == {
        "drop-last=true": True,
        "drop-last=false": False,
    }


def test_flags_without_lists_are_one_training():
    (training,) = plan("--lr", "0.2", "--drop-last")
    assert (training.name, training.recipe.lr, training.recipe.drop_last) == ("run", 0.2, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lrr", "0.1,0.2"], "`--lrr` is no flag of `allstep train digits`; did you mean `--lr`"),
        (["--lr", ","], "`lr` (=,) has an empty place"),
        (["--lr", "0.1,,0.2"], "`lr` (=0.1,,0.2) has an empty place"),
        (["--lr", "0.1,0.2,0.1"], "`lr` (=0.1,0.2,0.1) has 0.1 twice"),
        (["--lr", "0.1,0.10"], "lr=0.10 and lr=0.1 are the same training"),
        (["--lr", "0.1,x"], "`lr` (=x) must be a number"),
        (["--lr", "0.1", "--lr", "0.2"], "`lr` is given twice; give a list"),
        (["--optimizer", "sgd,lam"], "`optimizer` (=lam): did you mean `lamb`"),
        (["--epochs", "1,2.5"], "`epochs` (=2.5) must be a whole number"),
        (["--drop-last", "true,yes"], "`--drop-last` (=yes) takes no value"),
        (["--lr", "true,false"], "`--lr` needs a value"),
        (["--jobs", "1,2"], "`jobs` (=1,2) has one value for the whole command"),
        (["--workers", "1,2"], "`workers` (=1,2) has one value for the whole command"),
        (["--jobs", "0"], "`jobs` (=0) must be at least 1"),
        (["--jobs", "two"], "`jobs` (=two) must be a whole number"),
        (["--run-dir", "x"], "`--run-dir` is of one run, not of several"),
        (["--restarts", "1"], "`--restarts` is of one run, not of several"),
        (["--doctor", "quick"], "`--doctor` is of one run, not of several"),
        (["--best-metric", "loss,accuracy"], "`best_metric` (=loss,accuracy) must be one for all"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    flags, message, refused, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused("sweep", "digits", *flags)
    assert not any(tmp_path.iterdir())


def test_every_flag_of_the_launch_is_used_or_refused() -> None:
    for name in {field.name for field in fields(LaunchOptions)} - {"workers", "large_batch"}:
        with pytest.raises(UsageError, match="is of one run, not of several"):
            read_axes([f"--{name.replace('_', '-')}"])


def test_the_data_of_every_training_is_looked_for(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("some words " * 400)
    message = refused("sweep", "text", "--folder", f"{texts},{tmp_path / 'none'}")
    assert str(tmp_path / "none") in message
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_divided_recipe_is_refused(refused):
    assert "`cots` divides its model" in refused("sweep", "cots", "--seed", "0,1")


def test_a_launchers_worker_is_refused(refused, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "but torchrun has started it" in refused("sweep", "digits", "--lr", "0.1,0.2")


# -- the folder -------------------------------------------------------------------------------


def kept(folder: Path, *flags: str) -> None:
    keep_plan(folder, plan(*flags, folder=folder), "sweep_dir")


def test_the_same_sweep_may_go_on_in_its_folder(tmp_path):
    kept(tmp_path / "sweep", "--lr", "0.1,0.2")
    kept(tmp_path / "sweep", "--lr", "0.2,0.1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "0.1,0.3"], r"another sweep \(lr=0.2 is only in that one\)"),
        (["--lr", "0.1,0.2,0.3"], r"another sweep \(lr=0.3 is only in this one\)"),
        (["--lr", "0.1,0.2", "--epochs", "2"], r"another sweep \(epochs 30, not 2\)"),
    ],
)
def test_another_sweep_keeps_its_folder(flags, message, tmp_path):
    kept(tmp_path / "sweep", "--lr", "0.1,0.2")
    with pytest.raises(UsageError, match=message):
        kept(tmp_path / "sweep", *flags)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(UsageError, match=r"has other files, and no sweep\.json"):
        kept(tmp_path)
    with pytest.raises(UsageError, match="is a file; give a folder"):
        kept(tmp_path / "notes")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{")
    with pytest.raises(UsageError, match=r"sweep\.json is damaged"):
        kept(tmp_path / "sweep")


def test_axes_keep_all_other_words():
    words = ["--compile", "--lr=0.1", "--seed", "1,2", "--no-drop-last"]
    assert read_axes(words) == ({"seed": ["1", "2"]}, ["--compile", "--lr=0.1", "--no-drop-last"])


# -- the table --------------------------------------------------------------------------------


def reported(accuracy: float, **others: Any) -> dict[str, Any]:
    return {"metrics": {"accuracy": accuracy, "loss": 1 - accuracy}, "num_steps": 15, **others}


def results(*flags: str, reports: list[Any]):
    found = plan("--lr", "0.1,0.2,0.3,0.4", *flags)
    outcomes = [
        Outcome(training, failure=report)
        if isinstance(report, str)
        else Outcome(training, report=report)
        for training, report in zip(found, reports, strict=True)
    ]
    return ranked(outcomes)


REPORTS = [reported(0.5), None, reported(0.9), "the disk is full"]


def test_rows_are_sorted_by_accuracy_then_as_planned():
    rows = results(reports=REPORTS)
    assert [row.training.values["lr"] for row in rows] == ["0.3", "0.1", "0.2", "0.4"]
    assert [row.state for row in rows] == ["finished", "finished", "open", "failed"]


def test_rows_are_sorted_by_the_best_metric_at_its_best():
    flags = ["--best-metric", "loss", "--best-mode", "min"]
    reports = [reported(0.5, best_value=v) for v in (0.3, 0.1, 0.2, 0.4)]
    rows = results(*flags, reports=reports)
    assert [row.training.values["lr"] for row in rows] == ["0.2", "0.3", "0.1", "0.4"]


def test_the_best_accuracy_is_in_the_table(capsys, in_empty_folder):
    """The last one may be another."""
    reports = [reported(0.5, best_value=v) for v in (0.7, 0.9, 0.6, 0.8)]
    sweep_output.show(results("--best-metric", "accuracy", "--best-mode", "max", reports=reports))
    header, first, *_ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header[:4] == ["lr", "best", "accuracy", "accuracy"]
    assert first[:3] == ["0.2", "0.9000", "0.5000"]


def test_the_table_and_its_files(tmp_path, capsys, in_empty_folder):
    found = results(reports=REPORTS)
    sweep_output.show(found)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert lines[0] == ["lr", "accuracy", "loss", "steps", "run"]
    assert lines[1] == ["0.3", "0.9000", "0.1000", "15", "none/lr=0.3"]
    assert lines[4] == ["0.4", "none/lr=0.4", "failed"]
    assert lines[5] == ["lr=0.4", "failed:", "the", "disk", "is", "full"]
    names = sweep_output.write_files(tmp_path, found)
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert names == ["table.json", "table.csv", "plot.png"]
    plain = json.loads((tmp_path / "table.json").read_text())
    assert plain["metric"] == "accuracy"
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["lr"] for row in rows] == [row["lr"] for row in plain["runs"]]
    assert rows[0]["score"] == "0.9" and rows[3]["failure"] == "the disk is full"


@pytest.mark.parametrize("nothing", [None, math.nan])  # as it is written, and once was
def test_a_metric_that_is_not_finite(nothing, tmp_path, capsys, in_empty_folder):
    report = reported(0.5) | {"metrics": {"accuracy": 0.5, "loss": nothing}, "best_value": nothing}
    found = results(reports=[report] * 4)
    sweep_output.show(found)
    assert " nan " in capsys.readouterr().out
    sweep_output.write_files(tmp_path, found)
    rows = json.loads((tmp_path / "table.json").read_text(), parse_constant=pytest.fail)["runs"]
    assert [row["loss"] for row in rows] == [None] * 4


def test_no_picture_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(output_files, "find_spec", lambda name: None)
    found = sweep_output.write_files(tmp_path, results(reports=REPORTS))
    assert found == ["table.json", "table.csv"]


@pytest.mark.parametrize("flags", [[], ["--seed", "0,1"], ["--optimizer", "sgd,lamb"]])
def test_pictures_of_other_axes(flags, tmp_path):
    """No number, numbers with seeds, numbers with words."""
    numbers = ["--lr", "0.1,0.2"] if flags else ["--optimizer", "sgd,lamb"]
    found = make_plan("digits", [*numbers, *flags], tmp_path)
    outcomes = [Outcome(training, report=reported(0.5)) for training in found]
    assert "plot.png" in sweep_output.write_files(tmp_path, ranked(outcomes))


# -- whole sweeps -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.process
def test_a_run_that_fails_is_named_and_stops_no_other(tmp_path, capsys, in_empty_folder):
    """The other one is what `allstep train` makes of the same flags."""
    line = ["sweep", "digits", "--lr", "1e30,0.1", *QUICK, "--sweep-dir", "s", "--json"]
    assert main(line) == 1
    said = capsys.readouterr()
    good, bad = json.loads(said.out)["runs"]
    assert (good["lr"], good["state"], good["failure"]) == ("0.1", "finished", None)
    assert (bad["lr"], bad["state"], bad["score"]) == ("1e30", "failed", None)
    assert "not finite" in bad["failure"]
    assert f"lr=1e30: failed: {bad['failure']}" in said.err
    assert main(["train", "digits", "--lr", "0.1", *QUICK, "--run-dir", "alone"]) == 0
    alone = json.loads(Path("alone/report.json").read_text())
    of_sweep = json.loads(Path("s/lr=0.1/report.json").read_text())
    assert of_sweep["totals"] == alone["totals"]
    assert of_sweep["workers"] == 1


def begun(folder: Path) -> Launched:
    """Three trainings, of which two at a time."""
    line = ["digits", "--lr", "0.05,0.1,0.2", "--epochs", "3", "--width", "4", "--jobs", "2"]
    return Launched("-m", "allstep", "sweep", *line, "--sweep-dir", "s", cwd=folder)


def table_and_totals(folder: Path) -> tuple[str, list[Any]]:
    """Of a sweep that is begun, or goes on, there."""
    run = begun(folder)
    run.finish(within_s=RUN_S)
    assert run.code == 0, run.errors
    reports = sorted(folder.glob("s/*/report.json"))
    return run.output, [json.loads(path.read_text())["totals"] for path in reports]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[str, list[Any]]:
    return table_and_totals(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.process
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.long) for n in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_an_ended_sweep_goes_on_to_the_same_table(number, tmp_path, undisturbed):
    ended = begun(tmp_path)
    logs = tmp_path / "s"
    ended.wait_until(lambda: any(file.stat().st_size for file in logs.glob("*/metrics.jsonl")))
    family = psutil.Process(ended.process.pid).children(recursive=True)
    ended.process.send_signal(number)
    _, errors = ended.process.communicate(timeout=RUN_S)
    assert ended.code == (-number if number == signal.SIGKILL else 128 + number)
    _, alive = psutil.wait_procs(family, timeout=RUN_S)
    assert not alive
    assert len(list(logs.glob("*/report.json"))) < 3
    if number != signal.SIGKILL:
        assert "To go on: allstep sweep digits" in errors
    assert table_and_totals(tmp_path) == undisturbed


@pytest.mark.slow
@pytest.mark.process
def test_what_is_finished_is_not_run_again(tmp_path, in_empty_folder, capsys):
    line = ["sweep", "digits", "--seed", "0,1", *QUICK, "--sweep-dir", "s", "--workers", "2"]
    assert main(line) == 0
    table = capsys.readouterr().out
    times = {path: path.stat().st_mtime_ns for path in Path("s").glob("*/report.json")}
    assert main(line) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (table, "")
    assert times == {path: path.stat().st_mtime_ns for path in Path("s").glob("*/report.json")}
    assert json.loads(min(times).read_text())["workers"] == 2
