"""What `allstep advise` writes: all numbers as JSON, and a picture; or why it can't."""

import json
from pathlib import Path

import pytest

from allstep.cli import advise, output_files
from allstep.cli.main import main
from allstep.plan import AccuracyTable, measured_accuracy

BARE = ("--params", "25M", "--step-ms", "110", "--link", "10gbit", "--workers", "1,2,4,8,32")


pytestmark = pytest.mark.usefixtures("in_empty_folder")


def numbers(*arguments, **stand_ins):
    """What `--json` writes."""
    assert main(["advise", *arguments, "--json", "out.json"], **stand_ins) == 0
    return json.loads(Path("out.json").read_text())


def test_all_numbers_are_written():
    found = numbers(*BARE)
    assert len(found["predictions"]) == 6 * 5
    cell = next(p for p in found["predictions"] if p["policy"] == "DDP" and p["workers"] == 8)
    assert cell["sent_bytes"] == pytest.approx(2 * 7 / 8 * 100e6, rel=1e-3)
    assert cell["step_s"] > cell["compute_s"] == pytest.approx(0.11)
    assert cell["speed_up"] == pytest.approx(8 * cell["efficiency"])
    assert found["recommended"]["policy"] == "fp32"
    assert found["advice"].startswith("32 workers with fp32: ")
    assert found["lossy"]["policy"] == "fp16 + staleness 1"
    assert found["lossy_advice"].startswith("32 workers with fp16 + staleness 1 would be ")


def test_what_makes_the_table_is_written():
    found = numbers(*BARE, "--noise-scale", "300")
    assert found["noise_scale"] == 300
    assert found["forward_s"] + found["backward_s"] == pytest.approx(0.11)
    cluster = found["cluster"]
    assert cluster["inter"] == pytest.approx({"bandwidth_bps": 9.4e9, "latency_s": 30e-6})
    assert (cluster["num_nodes"], cluster["workers_per_node"]) == (32, 1)
    assert (cluster["copy_bytes_per_s"], cluster["compute_slowdown"]) == (10e9, 0.1)
    costs = {p["policy"]: p["points_lost"] for p in found["predictions"]}
    for name, cost in measured_accuracy().points_lost.items():
        assert costs[name] == {"mean": cost.mean, "std": cost.std}
    assert costs["DDP"] == {"mean": 0.0, "std": 0.0}
    assert found["accuracy_task"] == measured_accuracy().task
    for p in found["predictions"]:
        samples = (1 + p["global_batch"] / 300) / (1 + 32 / 300)
        assert p["relative_samples_to_target"] == pytest.approx(samples)
        assert p["relative_time_to_target"] == pytest.approx(samples / p["speed_up"])
    assert found["recommended"] in found["predictions"]


def test_what_is_not_known_is_null():
    found = numbers(*BARE, accuracy=AccuracyTable(None, 0, {}))
    assert (found["noise_scale"], found["accuracy_task"], found["total_samples"]) == (None,) * 3
    cell = next(p for p in found["predictions"] if p["policy"] == "fp16")
    for name in ("points_lost", "measured_s", "training_s", "relative_time_to_target"):
        assert cell[name] is None


def test_a_picture():
    pytest.importorskip("matplotlib")
    assert main(["advise", *BARE, "--plot", "out.png"]) == 0
    assert Path("out.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_without_matplotlib(refuse_advice, monkeypatch):
    monkeypatch.setattr(output_files, "find_spec", lambda name: None)
    message = refuse_advice(*BARE, "--plot", "out.png")
    assert "`plot` needs matplotlib: install it with `pip install 'allstep[plot]'`" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--json", "no/such/folder/out"],
            "`json` (=no/such/folder/out) can't be written: there is no folder no/such/folder.",
        ),
        (["--json", "."], "`json` (=.) can't be written: it is a folder."),
        (["--plot", "no/such/out.png"], "`plot` (=no/such/out.png) can't be written"),
        (["--plot", "out.xyz"], "`plot` (=out.xyz) must end in a kind of picture: ."),
        (["--plot", "out"], "`plot` (=out) must end in a kind of picture: ."),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    refuse_advice, monkeypatch, flags, message
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(advise, "read_subject", None)  # so that whoever goes on fails
    assert message in refuse_advice(*BARE, *flags)
    assert message in refuse_advice("digits", "--measure", *flags)


def test_a_closed_folder_is_refused(refuse_advice, monkeypatch):
    monkeypatch.setattr(output_files.os, "access", lambda path, mode: str(path) != ".")
    message = refuse_advice(*BARE, "--json", "out.json")
    assert "`json` (=out.json) can't be written: you may not write there." in message


def test_the_table_is_shown_though_the_disk_is_full(capsys):
    assert main(["advise", *BARE, "--json", "/dev/full"]) == 2
    found = capsys.readouterr()
    assert "advice: " in found.out
    assert found.err.startswith("error: `json` (=/dev/full) can't be written (")
