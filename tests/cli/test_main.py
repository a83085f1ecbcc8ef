"""Commands and bad input: one screen, exit code 2, no worker started."""

import errno
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import allstep
from allstep import device
from allstep.cli import run_folder, workers
from allstep.cli.main import main
from allstep.cli.train import read_command_line
from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.train.run_lock import run_lock
from tests.helpers.gpus import Gpus


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said(capsys):
    """Runs a command line that must fail with exit code 2; returns what it says, in one line."""

    def run(*arguments: str, **stand_ins: object) -> str:
        try:
            code = main(arguments, **stand_ins)
        except SystemExit as stop:
            code = stop.code
        assert code == 2
        text = capsys.readouterr().err
        assert len(text.splitlines()) < 25
        assert "Traceback" not in text
        assert "╭" not in text  # of a frame
        return " ".join(text.split())

    return run


def make_run(name="digits", *, fields=None, checkpoint=True) -> Path:
    """A run's folder, as far as the command line looks before it starts workers."""
    run_dir = Path("runs/a")
    run_dir.mkdir(parents=True)
    recipe = {"recipe": name, "allstep": "0.0.9", "fields": fields or {}}
    (run_dir / "recipe.json").write_text(json.dumps(recipe))
    if checkpoint:
        (run_dir / "checkpoints" / "step-00000003").mkdir(parents=True)
    return run_dir


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"allstep {allstep.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["train", "--help"]])
def test_help(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: allstep")


def test_a_recipes_help_names_every_field_and_the_launch_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "digits", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--workers", "--run-dir", "--global-batch", "--precision", "--dropout"):
        assert flag in text


def test_recipes_are_listed(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(allstep.recipes.REGISTRY)


def test_a_recipe_is_shown_with_defaults_and_help(capsys):
    assert main(["recipes", "digits"]) == 0
    text = capsys.readouterr().out
    assert "--micro-batch" in text
    assert "(default: 16)" in text


def test_nothing_is_a_short_usage(capsys):
    assert main([]) == 2
    assert "train" in capsys.readouterr().out


def test_train_without_a_recipe_lists_them(said):
    assert "recipes: bert, cots, digits" in said("train")
    assert "recipes: bert, cots, digits" in said("train", "--workers", "2")


def test_an_unknown_command_gets_the_nearest(said):
    assert said("trian") == "error: There is no command `trian`; did you mean `train`?"


@pytest.mark.parametrize("command", ["train", "recipes"])
def test_an_unknown_recipe_gets_the_nearest(said, command):
    message = said(command, "digit")
    assert message == "error: There is no recipe `digit`; did you mean `digits`?"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "many"], "error: `epochs` (=many) must be a whole number, such as"),
        (["--lr", "fast"], "error: `lr` (=fast) must be a number, such as `--lr 0.1`."),
        (["--precision", "float8"], "error: `precision` (=float8): did you mean"),
        (["--best-mode", "mix"], "error: `best_mode` (=mix): did you mean `min`, `max`?"),
        (["--microbatch", "4"], "`--microbatch` is no flag of `allstep train digits`; did you"),
        (["--epochs"], "error: `--epochs` needs a value"),
        (["3"], "error: `3` is no flag of `allstep train digits`"),
        (["--epochs", "0"], "error: `epochs` (=0) must be at least 1."),
        (
            ["--global-batch", "1000", "--micro-batch", "48"],
            "`global_batch` (=1000) must be a multiple of `micro_batch` (=48); nearest: 960, 1008.",
        ),
        (["--workers", "0"], "`workers` (=0) must be at least 1."),
        (
            ["--workers", "two"],
            "error: `workers` (=two) must be a whole number, such as `--workers 2`.",
        ),
    ],
)
def test_a_bad_flag_is_explained(said, flags, message):
    assert message in said("train", "digits", *flags)
    assert not Path("runs").exists()


def test_a_short_run_gets_a_short_warmup(capsys):
    def warmup_epochs(*flags: str) -> float:
        _, recipe = read_command_line("digits", *flags)
        return recipe.warmup_epochs

    assert warmup_epochs("--epochs", "2") == pytest.approx(0.2)
    assert "warm-up: 0.2 of 2 epochs" in capsys.readouterr().out
    assert warmup_epochs("--epochs", "5", "--warmup-epochs", "3") == 3.0
    assert warmup_epochs() == pytest.approx(3.0)
    assert capsys.readouterr().out == ""


def test_more_workers_than_gpus_are_refused(said):
    with device.using_driver(Gpus(2)):
        message = said("train", "digits", "--workers", "3")
    assert message == (
        "error: `workers` (=3) exceeds this machine's GPUs (2): start at most 2, or hide the GPUs:"
        " CUDA_VISIBLE_DEVICES= before the command."
    )


@pytest.mark.parametrize(("requested", "is_warned"), [(2, False), (3, True)])
def test_more_workers_than_cores_are_warned_of(monkeypatch, capsys, requested, is_warned):
    monkeypatch.setattr(workers, "num_cores", lambda: 2)
    with device.using_driver(Gpus(0)):
        assert workers.num_workers_to_start(requested) == requested
    warning = "warning: `workers` (=3) exceeds this machine's cores (2)"
    assert capsys.readouterr().err.startswith(warning) == is_warned


def test_a_launcher_that_contradicts_itself(said, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert "WORLD_SIZE" in said("train", "digits")


def test_workers_that_contradict_the_launcher(said, monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = said("train", "digits", "--workers", "3")
    assert message == (
        "error: `workers` (=3) contradicts torchrun, which started 2: leave `--workers` out."
    )


@pytest.mark.parametrize("arguments", [["digits", "--epochs", "many"], ["digit"]])
def test_only_rank_0_explains(monkeypatch, capsys, arguments):
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        code = main(["train", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert capsys.readouterr().err == ""


def test_a_run_folder_that_is_taken(said):
    run_dir = make_run()
    message = said("train", "digits", "--run-dir", str(run_dir), "--workers", "2")
    assert message == (
        "error: `run_dir` (=runs/a) holds a run already: continue it with"
        " `allstep train --resume runs/a`, or choose another folder; `--resume auto` does"
        " whichever fits."
    )


def test_a_run_that_was_refused_leaves_its_folder_to_the_next():
    """As by its workers, who found that there is no such metric."""
    wrong = {"best_metric": "acuracy", "best_mode": "max"}
    run_dir = make_run(fields=wrong, checkpoint=False)
    _, recipe = read_command_line("digits", "--best-metric", "accuracy", "--best-mode", "max")
    assert run_folder.find_run(recipe, run_dir) is None
    assert run_folder.make_run_dir("digits", run_dir) == run_dir
    (run_dir / "metrics.jsonl").touch()  # the control
    with pytest.raises(UsageError, match="best_metric acuracy, not accuracy"):
        run_folder.find_run(recipe, run_dir)
    with pytest.raises(UsageError, match="holds a run already"):
        run_folder.make_run_dir("digits", run_dir)


def test_a_run_folder_that_is_a_file(said):
    Path("a").touch()
    message = said("train", "digits", "--run-dir", "a", "--workers", "2")
    assert message == "error: `run_dir` (=a) is a file; give a folder."


@pytest.mark.parametrize("flags", [["--run-dir", "runs/a"], []])
def test_a_run_folder_behind_a_link_that_leads_nowhere(said, flags):
    Path("runs").symlink_to("missing")
    message = said("train", "digits", "--workers", "2", *flags)
    assert message.startswith("error: `run_dir` (=runs/")
    assert message.endswith(
        "can't be made: runs is a link that leads nowhere, to missing; make that folder, mount it,"
        " or remove the link."
    )


def test_a_run_folder_that_cannot_be_made(said):
    Path("a").touch()
    message = said("train", "digits", "--run-dir", "a/b", "--workers", "2")
    assert message == (
        "error: `run_dir` (=a/b) can't be made (Not a directory); choose another folder."
    )


@pytest.mark.parametrize(
    "command",
    [
        *("evaluate", "sharpness", "watch", "join", "verify", "train --resume"),
        *("train digits --run-dir", "train text --folder", "train images --folder"),
        *("sweep digits --lr 0.1,0.2 --sweep-dir", "advise digits --cluster"),
        "advise digits --link 1gbit --json",
    ],
)
def test_a_name_that_is_too_long_for_a_path(said, command):
    message = said(*command.split(), "x" * 300)
    assert message.startswith("error: xxx")
    assert message.endswith("can't be used (File name too long)")


@pytest.mark.parametrize("flags", [[], ["--all-checkpoints"]])
def test_a_sharpness_that_cannot_be_kept_is_not_measured(said, flags):
    file = make_run() / ("sharpness.jsonl" if flags else "sharpness.json")
    file.mkdir()
    message = said("sharpness", "runs/a", *flags)
    assert message == f"error: `run` (={file}) can't be written: it is a folder."


def test_a_path_that_is_closed(said):
    Path("train.py").touch()

    def launch(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "data/x")

    message = said("advise", "train.py", "--link", "1gbit", launch=launch)
    assert message == "error: data/x can't be used (Permission denied)"


@pytest.mark.parametrize(
    ("command", "argument"),
    [("train --resume", "resume"), ("evaluate", "run"), ("watch", "run")],
)
class TestExistingRun:
    def test_no_folder(self, said, command, argument):
        make_run()
        message = said(*command.split(), "runs/b")
        assert message == f"error: `{argument}` (=runs/b) is no folder; did you mean `runs/a`?"

    def test_no_folder_and_no_other(self, said, command, argument):
        message = said(*command.split(), "runs/b")
        assert message == f"error: `{argument}` (=runs/b) is no folder; see `runs/` for your runs."

    def test_no_recipe(self, said, command, argument):
        Path("runs/b").mkdir(parents=True)
        message = said(*command.split(), "runs/b")
        assert message == (
            f"error: `{argument}` (=runs/b) has no recipe.json: it is no run of `allstep train`."
        )

    @pytest.mark.parametrize("inside", ["checkpoints", "checkpoints/step-00000003"])
    def test_a_folder_inside_a_run(self, said, command, argument, inside):
        make_run()
        message = said(*command.split(), f"runs/a/{inside}")
        assert message == (
            f"error: `{argument}` (=runs/a/{inside}) has no recipe.json: it is no run of"
            " `allstep train`; did you mean `runs/a`?"
        )

    @pytest.mark.parametrize(
        "text",
        [
            *("{", "[]", "{}", "3", '{"recipe": "digits", "fields": 3}', "\xff"),
            '{"recipe": "digits", "fields": ["lr"]}',
            pytest.param("[" * 10**5, id="deep"),
        ],
    )
    def test_damaged(self, said, command, argument, text):
        (make_run() / "recipe.json").write_text(text, encoding="latin-1")
        message = said(*command.split(), "runs/a")
        assert message == "error: runs/a/recipe.json is damaged: it doesn't hold a recipe."

    def test_unknown_recipe(self, said, command, argument):
        make_run("digitz")
        message = said(*command.split(), "runs/a")
        assert message == "error: There is no recipe `digitz`; did you mean `digits`?"

    def test_unknown_field(self, said, command, argument):
        make_run(fields={"wideness": 3})
        assert said(*command.split(), "runs/a") == (
            "error: `wideness` is no field of recipe `digits`; the run was made by"
            f" allstep 0.0.9, this is {allstep.__version__}."
        )


@pytest.mark.parametrize("command", ["evaluate", "sharpness"])
def test_a_run_without_a_checkpoint_cannot_be_measured(said, command):
    run_dir = make_run(checkpoint=False)
    assert said(command, "runs/a") == (
        "error: `run` (=runs/a) has no checkpoint: it ended before the first one was written;"
        " train it: `allstep train --resume runs/a`."
    )
    with run_lock(run_dir, Communicator.single_process()):
        assert said(command, "runs/a") == (
            "error: `run` (=runs/a) has no checkpoint yet: it is being trained by process"
            f" {os.getpid()} on {socket.gethostname()}."
        )


@pytest.mark.parametrize("command", ["--resume runs/a", "digits --run-dir runs/a"])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_run_in_training_is_left_alone(said, command, checkpoint):
    run_dir = make_run(checkpoint=checkpoint)
    with run_lock(run_dir, Communicator.single_process()):
        message = said("train", *command.split())
    assert message.startswith(
        f"error: `run_dir` (=runs/a) is being trained by process {os.getpid()} on"
        f" {socket.gethostname()}: wait for its end"
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_finished_run_is_left_alone(capsys, num_workers):
    run_dir = make_run(fields={"epochs": 4})
    report = {"num_steps": 60, "num_epochs": 4, "interrupted": None, "samples_per_s": 9.5}
    (run_dir / "report.json").write_text(json.dumps(report))
    assert main(["train", "--resume", "runs/a", "--workers", str(num_workers)]) == 0
    assert json.loads((run_dir / "report.json").read_text()) == report
    said = capsys.readouterr().out
    assert "runs/a finished at step 60, after 4 epochs" in said
    assert "allstep evaluate runs/a" in said
    assert "allstep train digits --epochs N" in said


def test_a_report_of_what_is_not_finite_is_json():
    run_dir = make_run()
    report = {"num_steps": 60, "metrics": {"loss": math.nan}, "totals": {"loss": (math.inf, 360)}}
    run_folder.write_report(run_dir, report)
    found = json.loads((run_dir / "report.json").read_text(), parse_constant=pytest.fail)
    assert found == report | {"metrics": {"loss": None}, "totals": {"loss": [None, 360]}}


def test_a_run_that_stopped_early_is_finished(capsys):
    run_dir = make_run(fields={"epochs": 4, "best_metric": "loss", "best_mode": "min"})
    report = {"num_steps": 45, "num_epochs": 3, "interrupted": None, "stopped_early": True}
    (run_dir / "report.json").write_text(json.dumps(report))
    assert main(["train", "--resume", "runs/a"]) == 0
    assert "runs/a finished at step 45, after 3 epochs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "report",
    [
        None,
        "{",
        "[" * 10**5,
        [],
        {"num_steps": 60},
        {"num_steps": 60, "num_epochs": 4, "interrupted": 2},
        {"num_steps": 45, "num_epochs": 3, "interrupted": None},
    ],
)
def test_a_run_with_something_left_to_do_is_not_finished(report):
    run_dir = make_run(fields={"epochs": 4})
    if report is not None:
        text = report if isinstance(report, str) else json.dumps(report)
        (run_dir / "report.json").write_text(text)
    recipe = run_folder.read_recipe(run_dir, argument="resume")
    assert run_folder.finished_report(run_dir, recipe) is None


def test_a_number_that_belongs_nowhere_is_refused_at_resume(said):
    make_run()
    message = said("train", "--resume", "runs/a", "3")
    assert message.startswith("error: `3` can't be given with `--resume`: ")


def test_recipe_flags_are_refused_at_resume(said):
    make_run()
    message = said("train", "digits", "--resume", "runs/a", "--epochs", "3", "--workers", "2")
    assert message == (
        "error: `digits`, `--epochs` can't be given with `--resume`: the recipe and its fields"
        " come from runs/a/recipe.json. Only `--workers`, `--elastic`, `--min-workers`,"
        " `--store`, `--restarts` and `--doctor` may differ."
    )


@pytest.mark.process
@pytest.mark.parametrize("command", ["recipes", "--help"])
def test_a_reader_that_has_ended_is_no_traceback(command):
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "allstep", command]
    done = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, timeout=200)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
