"""`allstep advise --curve FILE` says what would lower the error."""

import json
from pathlib import Path

import pytest

from allstep.cli.main import main

BARE = ["advise", "--params", "25M", "--step-ms", "110", "--link", "10gbit", "--workers", "1,2"]
CURVE = {
    "recipe": "fashion",
    "num_samples": 60_000,
    "newest_fit": {"floor": None, "floor_interval": {"low": 0.0, "high": 0.04}},
    "all_samples": {"error": 0.1},
    "twice_the_samples": {"error": 0.08, "low": 0.07, "high": 0.09},
}

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def test_a_curve_gives_a_line_of_advice(capsys):
    Path("curve.json").write_text(json.dumps(CURVE))
    assert main([*BARE, "--curve", "curve.json", "--json", "out.json"]) == 0
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "curve: more data: twice the 60,000 samples would take the held-out error" in printed
    found = json.loads(Path("out.json").read_text())
    assert found["would_help"] == "more data"
    assert found["curve_advice"].startswith("more data: ")


def test_without_a_curve_there_is_no_such_line(capsys):
    assert main([*BARE, "--json", "out.json"]) == 0
    assert "curve:" not in capsys.readouterr().out
    found = json.loads(Path("out.json").read_text())
    assert (found["would_help"], found["curve_advice"]) == (None, None)


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({**CURVE, "newest_fit": {}})])
def test_a_file_of_something_else_is_refused(text, refused):
    Path("curve.json").write_text(text)
    message = refused(*BARE, "--curve", "curve.json", "--json", "out.json")
    assert "`curve` (=curve.json) is no curve.json of `allstep curve`" in message
    assert not Path("out.json").exists()


def test_another_recipes_curve_is_refused(refused):
    Path("curve.json").write_text(json.dumps(CURVE))
    line = ["advise", "digits", "--link", "1gbit", "--workers", "1,2", "--curve", "curve.json"]
    assert "is of the recipe fashion, not of digits" in refused(*line)


def test_a_missing_file_is_refused(refused):
    assert "`curve` (=none.json) can't be read" in refused(*BARE, "--curve", "none.json")
