"""`train --large-batch` and `sharpness` from the command line."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from allstep import Communicator
from allstep.cli.main import main
from allstep.cli.sharpness import Request, sharpness_worker
from allstep.cli.train import read_command_line
from allstep.optim import rescale
from allstep.recipes.digits import Digits
from allstep.recipes.large_batch import apply_large_batch
from allstep.recipes.text import Text
from tests.helpers.ranks import run_ranks
from tests.helpers.terminal import Terminal


def test_a_published_recipe_sets_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    _, recipe = read_command_line(
        "digits", "--large-batch", "lars_32k", "--global-batch", "1024", "--epochs", "10"
    )
    settings = rescale("lars_32k", global_batch=1024, epochs=10).settings
    assert recipe.settings == settings
    assert (recipe.optimizer, recipe.lr) == ("lars", pytest.approx(8.5 / 2))
    shown = capsys.readouterr().out
    assert "lr             21.2       4.25     linear in the batch, from the one at 2,048" in shown
    assert "micro_batch    128        16       yours" in shown
    assert "MLPerf v1.0 reference convergence points" in shown
    assert "top-1 75.9 %" in shown
    assert "changed" not in shown


def test_flags_win(capsys: pytest.CaptureFixture[str]) -> None:
    _, recipe = read_command_line("digits", "--large-batch", "goyal_1h", "--lr", "0.7")
    assert (recipe.lr, recipe.lr_schedule) == (0.7, "step")
    assert "Your flags changed it: lr 0.7." in capsys.readouterr().out


def test_akibas_batch_norm_comes_along() -> None:
    _, recipe = read_command_line("digits", "--large-batch", "akiba_15min")
    assert recipe.last_statistics
    model = recipe.task(Communicator.single_process()).model
    assert model.features[1].momentum == 1.0
    assert Digits().task(Communicator.single_process()).model.features[1].momentum != 1.0


def test_mixed_batches_make_two_stages() -> None:
    text = Text(epochs=10, global_batch=64)
    applied, _ = apply_large_batch(text, "lamb_bert_76min")
    assert isinstance(applied, Text)
    assert (applied.second_sequence_length, applied.second_epochs) == (256, 1)
    assert (applied.second_batch, applied.second_micro_batch) == (32, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--large-batch", "goyal"], "`large_batch` (='goyal'): did you mean `goyal_1h`"),
        (["--large-batch", "lamb_bert_76min"], "Recipe `digits` has no sequences that could grow"),
        (["--large-batch", "lars_32k", "--lr", "-1"], "`lr` (=-1.0) must be above 0"),
        (["--warmup-start", "3"], "`warmup_start` (=3.0) must be 0 to 1"),
        (["--optimizer", "rmsprop_warmup", "--warmup-epochs", "0"], "`warmup_epochs` (=0.0) must"),
    ],
)
def test_bad_flags(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    try:
        code = main(["train", "digits", *arguments, "--run-dir", str(folder)])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (folder / "recipe.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"second_sequence_length": 64}, "`second_sequence_length` (=64) must exceed"),
        ({"second_epochs": 2}, "`second_epochs` (=2) must be at least 1 and below `epochs`"),
        ({"second_epochs": 0}, "`second_epochs` (=0) must be at least 1 and below `epochs`"),
        ({"second_warmup_epochs": -1.0}, "`second_warmup_epochs` (=-1.0) must be 0 or more and"),
        ({"second_warmup_epochs": 1.0}, "`second_warmup_epochs` (=1.0) must be 0 or more and"),
        ({"second_lr_share": 0.0}, "`second_lr_share` (=0.0) must be positive"),
        ({"second_global_batch": 6}, "`second_global_batch` (=6) must be a multiple of the second"),
    ],
)
def test_bad_second_stages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="second") as raised:
        Text(**{"epochs": 2, "second_sequence_length": 256} | changes)
    assert message in str(raised.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from allstep.cli import run_folder

    run_dir = tmp_path_factory.mktemp("trained") / "run"
    recipe = Digits(
        epochs=1, width=4, global_batch=192, warmup_epochs=0.0, checkpoint_every_steps=4
    )
    run_folder.make_run_dir("digits", run_dir)
    run_folder.write_recipe(run_dir, recipe)
    import allstep

    comm = Communicator.single_process()
    allstep.fit(recipe.task(comm), recipe, comm, run_dir)
    return run_dir


def test_sharpness_of_a_run_on_any_workers(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = asdict(Request(samples=200, sigma=0.05, num_draws=4, max_products=20))
    found = []
    for num_workers in (1, 2, 3):
        run_ranks(num_workers, lambda comm: sharpness_worker(comm, str(trained), request))
        found.append(json.loads((trained / "sharpness.json").read_text()))
    assert found[0]["num_samples"] == 192  # whole micro-batches of 16
    assert found[0]["step"] == 8
    for other in found[1:]:
        assert other["top_eigenvalue"] == pytest.approx(found[0]["top_eigenvalue"], rel=1e-3)
        assert other["loss_rise"] == pytest.approx(found[0]["loss_rise"], rel=1e-3)
    shown = capsys.readouterr().out
    assert "top eigenvalue: " in shown and "of 192 training samples" in shown


def test_a_sharpness_that_is_not_finite_is_json(trained: Path) -> None:
    request = asdict(Request(samples=16, sigma=1e30, num_draws=2, max_products=2))
    sharpness_worker(Communicator.single_process(), str(trained), request)
    text = (trained / "sharpness.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss_rise"] is None


def test_sharpness_of_all_checkpoints(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = Request(samples=64, sigma=0.05, num_draws=2, max_products=3, layers=True)
    sharpness_worker(Communicator.single_process(), str(trained), asdict(request))
    newest = json.loads((trained / "sharpness.json").read_text())
    of_all = asdict(replace(request, all_checkpoints=True))
    capsys.readouterr()
    for num_workers in (1, 2):
        run_ranks(num_workers, lambda comm: sharpness_worker(comm, str(trained), of_all))
        lines = (trained / "sharpness.jsonl").read_text().splitlines()
        first, last = map(json.loads, lines)
        assert (first["step"], last["step"]) == (4, 8)
        assert first["loss"] > 1.02 * last["loss"]
        assert last["loss"] == pytest.approx(newest["loss"], rel=1e-5)
    header, early, late = capsys.readouterr().out.splitlines()[:3]
    assert header.split() == ["step", "loss", "top", "eigenvalue", "loss", "rise", "LARS", "LAMB"]
    assert [line.split()[0] for line in (early, late)] == ["4", "8"]


def test_passes_are_shown_on_a_terminal(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = asdict(Request(samples=64, sigma=0.05, num_draws=2, max_products=3))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    sharpness_worker(Communicator.single_process(), str(trained), request)
    # 4 micro-batches in at most 1 + 3 + 2 sums.
    assert "pass 24/24" in terminal.getvalue()
    assert "pass" not in capsys.readouterr().out
    monkeypatch.undo()
    sharpness_worker(Communicator.single_process(), str(trained), request)
    assert capsys.readouterr().err == ""


def test_too_few_products_are_told(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for max_products, is_told in ((2, True), (200, False)):
        request = asdict(Request(samples=64, sigma=0.05, num_draws=2, max_products=max_products))
        sharpness_worker(Communicator.single_process(), str(trained), request)
        shown = capsys.readouterr().out
        assert ("not converged, raise --max-products" in shown) == is_told


def test_bad_sharpness(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (
        ("samples", "0"),
        ("sigma", "nan"),
        ("num-draws", "1"),
        ("max-products", "1"),
    ):
        assert main(["sharpness", str(trained), f"--{flag}", value, "--workers", "2"]) == 2
        printed = capsys.readouterr()
        assert f"`{flag.replace('-', '_')}` (={value}) must be " in printed.err
        assert "worker" not in printed.err + printed.out  # none was started
    assert main(["sharpness", str(trained.parent)]) == 2
    assert "has no recipe.json" in capsys.readouterr().err
    assert main(["sharpness", str(trained / "nothing")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_sharpness_of_each_layer(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    request = Request(samples=32, sigma=0.05, num_draws=2, max_products=6, layers=True)
    sharpness_worker(Communicator.single_process(), str(trained), asdict(request))
    layers = json.loads((trained / "sharpness.json").read_text())["layers"]
    shown = capsys.readouterr().out
    names = [
        name
        for name, _ in Digits(width=4).task(Communicator.single_process()).model.named_parameters()
    ]
    assert [layer["name"] for layer in layers] == names
    assert all(name in shown for name in names)
    assert "1 / curvature" in shown and "|w| / |g|" in shown
