"""`allstep curve`: which trainings it has, what it says before and after the whole is measured."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from allstep.cli import output_files
from allstep.cli.main import main
from allstep.cli.trainings import Jobs, Outcome, Training
from allstep.data import subset

pytestmark = pytest.mark.usefixtures("in_empty_folder")

NUM_TRAIN, NUM_HELD_OUT = 1437, 360
LINE = ["curve", "digits", "--curve-dir", "c"]


class Law:
    """In place of trainings: right answers by a law; keeps which trainings there were."""

    def __init__(self, floor: float, exponent: float = 0.6, came: int | None = None) -> None:
        self._floor, self._exponent, self._came = floor, exponent, came
        self.asked: list[list[Training]] = []

    def __call__(
        self, trainings: Sequence[Training], jobs: Jobs
    ) -> tuple[list[Outcome], int | None]:
        self.asked.append(list(trainings))
        return [self._outcome(each) for each in trainings], self._came

    def _outcome(self, training: Training) -> Outcome:
        recipe = training.recipe
        n = len(subset(range(NUM_TRAIN), recipe.train_share))  # type: ignore[arg-type]
        error = self._floor + 2 * n**-self._exponent + 0.001 * (recipe.seed - 1)
        totals = {"accuracy": (NUM_HELD_OUT * (1 - error), NUM_HELD_OUT)}
        return Outcome(training, report={"totals": totals})


def run(*flags: str, floor: float = 0.0) -> tuple[Law, dict[str, Any]]:
    law = Law(floor)
    assert main([*LINE, *flags], train=law) == 0
    return law, json.loads(Path("c/curve.json").read_text())


def test_all_shares_have_as_many_steps() -> None:
    """As the recipe has on the whole set; the warm-up has its share of them."""
    law, _ = run("--check")
    on_parts, on_whole = law.asked
    assert len(on_parts) == 12 and len(on_whole) == 3
    for training in [*on_parts, *on_whole]:
        recipe = training.recipe
        num_samples = len(subset(range(NUM_TRAIN), recipe.train_share))  # type: ignore[arg-type]
        steps = recipe.epochs * recipe.steps_per_epoch(num_samples)
        assert steps == pytest.approx(450, rel=0.02)
        assert recipe.warmup_epochs == pytest.approx(0.1 * recipe.epochs)
        assert recipe.evaluate_every_epochs == recipe.epochs
    assert {training.recipe.epochs for training in on_whole} == {30}
    shares = [training.recipe.train_share for training in on_parts]
    assert shares == sorted(shares, reverse=True)
    assert {training.recipe.seed for training in on_parts} == {0, 1, 2}


def test_all_shares_have_as_many_epochs_if_asked() -> None:
    law, found = run("--equal", "epochs", "--epochs", "7", "--warmup-epochs", "2")
    assert {each.recipe.epochs for each in law.asked[0]} == {7}
    assert {each.recipe.warmup_epochs for each in law.asked[0]} == {2.0}
    assert found["equal"] == "epochs"


def test_a_law_is_found_and_the_whole_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run()
    assert found["fit"]["exponent"] == pytest.approx(0.6, abs=0.02)
    truth = 2 * NUM_TRAIN**-0.6
    assert found["predicted"]["error"] == pytest.approx(truth, abs=0.002)
    assert found["predicted"]["low"] < truth < found["predicted"]["high"]
    assert found["in_full"] is None and found["fit"]["floor"] is None
    printed = capsys.readouterr().out
    assert "predicted on all 1,437 samples: " in printed
    assert "measured on all" not in printed
    assert "don't tell from 0 what stays with any amount of data" in printed
    assert Path("c/curve.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    law = Law(0.05)

    def train(*arguments: Any) -> Any:
        Path("c/curve.png").mkdir()
        return law(*arguments)

    assert main(LINE, train=train) == 2
    assert "error: c/curve.png can't be written (Is a directory)" in capsys.readouterr().err
    assert json.loads(Path("c/curve.json").read_text())["predicted"]


def test_the_prediction_is_said_and_written_before_the_whole_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    law = Law(0.05)
    before: list[Any] = []

    def train(trainings: Sequence[Training], *others: Any) -> Any:
        if trainings[0].recipe.train_share == 1:
            before.append(json.loads(Path("c/curve.json").read_text()))
            before.append(capsys.readouterr().out)
        return law(trainings, *others)

    assert main([*LINE, "--check"], train=train) == 0
    plain, printed = before
    assert plain["in_full"] is None and "predicted on all" in printed
    found = json.loads(Path("c/curve.json").read_text())
    assert found["predicted"] == plain["predicted"]
    assert found["in_full"]["mean"] == pytest.approx(0.05 + 2 * NUM_TRAIN**-0.6)
    assert found["in_full"]["is_in_interval"]
    assert found["newest_fit"] != found["fit"] == plain["fit"]
    printed = capsys.readouterr().out
    assert "measured on all 1,437 samples: " in printed and "in the interval" in printed


def test_a_wrong_prediction_is_said_to_be_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """Here the whole set has a floor that its parts don't have."""

    def train(trainings: Sequence[Training], *others: Any) -> Any:
        return Law(0.3 if trainings[0].recipe.train_share == 1 else 0.0)(trainings, *others)

    assert main([*LINE, "--check"], train=train) == 0
    assert "outside the interval" in capsys.readouterr().out
    assert not json.loads(Path("c/curve.json").read_text())["in_full"]["is_in_interval"]


def test_three_shares_say_that_they_know_no_floor(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run("--shares", "0.03,0.1,0.3", floor=0.1)
    assert found["fit"]["floor"] is None
    assert found["fit"]["floor_interval"]["high"] > 0.1
    assert "four shares are needed" in capsys.readouterr().out


def test_a_large_floor_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run("--shares", "0.01,0.03,0.1,0.3,0.6", floor=0.3)
    assert found["fit"]["floor"] == pytest.approx(0.3, abs=0.02)
    assert "no amount of data goes below that" in capsys.readouterr().out


def test_programs_get_all_numbers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run("--json", "--check")
    assert json.loads(capsys.readouterr().out) == found


def test_no_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "find_spec", lambda name: None)
    run()
    assert not Path("c/curve.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shares", "0.1"], "`shares` (=0.1) must be two or more"),
        (["--shares", "0.1,0.1"], "`shares` (=0.1,0.1) must be two or more, each once"),
        (["--shares", "0.1,1"], "below 1: the whole set is predicted"),
        (["--shares", "0.1,"], "must be numbers between commas"),
        (["--shares", "0.0001,0.0002"], "are [1, 1], of which some are equal"),
        (["--seeds", "0"], "`seeds` (=0) must be at least 1"),
        (["--seeds", "1,2"], "`seeds` (=1,2) has one value for the whole command"),
        (["--seed", "3"], "`seed` can't be given to `allstep curve`: `--seeds` says how many"),
        (["--train-share", "0.5"], "`--shares` says which"),
        (["--lr", "0.1,0.2"], "`lr` (=0.1,0.2) has one value for a curve"),
        (["--run-dir", "x"], "`--run-dir` is of one run, not of several"),
        (["--drop-last"], "`global_batch` (=96) exceeds the training set"),
        (["--doctor", "quick"], "`--doctor` is of one run, not of several"),
        (["--shares", "0.1,0.3", "--seeds", "1"], "`seeds` (=1) with two shares leave nothing"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    flags: list[str], message: str, refused: Callable[..., str]
) -> None:
    law = Law(0.0)
    assert message in refused(*LINE, *flags, train=law)
    assert not law.asked and not Path("c").exists()


def test_shares_that_are_nearly_equal_have_folders_of_their_own() -> None:
    law, _ = run("--shares", "0.1,0.5,0.5000001")
    names = {training.run_dir.name for training in law.asked[0]}
    assert len(names) == len(law.asked[0]) == 9
    assert {"train-share=0.5,seed=0", "train-share=0.5000001,seed=0"} < names


def test_shares_below_the_global_batch_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LINE, train=Law(0.0)) == 0
    assert "Those on 14 and 43 samples had smaller steps" in capsys.readouterr().out
    assert main([*LINE[:-1], "d", "--shares", "0.1,0.3,0.5"], train=Law(0.0)) == 0
    assert "smaller steps" not in capsys.readouterr().out


def test_a_whole_that_was_measured_stays_in_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main([*LINE, "--check"], train=Law(0.0)) == 0
    checked = json.loads(Path("c/curve.json").read_text())
    assert checked["in_full"] is not None
    monkeypatch.setattr(Training, "read_report", lambda self: {})  # all have come to their end
    assert main(LINE, train=Law(0.0)) == 0
    assert json.loads(Path("c/curve.json").read_text()) == checked


def test_another_curve_keeps_its_folder(refused: Callable[..., str]) -> None:
    run("--seeds", "2")
    assert "holds another sweep" in refused(*LINE, "--seeds", "3", train=Law(0.0))
    run("--seeds", "2", "--check")


def test_errors_that_do_not_fall_give_no_curve(refused: Callable[..., str]) -> None:
    assert "the error doesn't fall" in refused(*LINE, train=Law(-1.9, exponent=0.0))


def test_an_ended_curve_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "digits"], train=Law(0.0, came=2)) == 130
    assert "To go on: allstep curve digits --curve-dir curves/digits-" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_real_trainings_give_a_curve_once(capsys: pytest.CaptureFixture[str]) -> None:
    """More data, fewer errors; what is measured is not trained again."""
    line = [*LINE, "--shares", "0.02,0.3", "--seeds", "2", "--epochs", "2", "--check"]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "measured on all 1,437 samples" in printed
    times = {path: path.stat().st_mtime_ns for path in Path("c").glob("*/report.json")}
    assert len(times) == 6
    assert main(line) == 0
    assert capsys.readouterr().out == printed
    assert times == {path: path.stat().st_mtime_ns for path in Path("c").glob("*/report.json")}
