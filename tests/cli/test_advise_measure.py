"""`allstep advise --measure`: what is run, shown and refused."""

import json
from functools import partial
from pathlib import Path

import pytest

from allstep.cli.advise_measure import ask_first
from allstep.cli.main import main
from allstep.comm import Communicator
from allstep.doctor import measure, measure_policy
from allstep.plan import POLICIES
from tests.doctor.test_measure import HURRY
from tests.helpers.ranks import run_ranks

BARE = ("--params", "1000", "--step-ms", "3")


pytestmark = pytest.mark.usefixtures("in_empty_folder")


def start_threads(num_workers, body, **arguments):
    """In a hurry, and without torch's DDP, which wants processes."""
    body = partial(
        body,
        policies=POLICIES[1:3],
        measure=partial(measure, effort=HURRY),
        measure_policy=partial(measure_policy, num_repeats=1, seconds=0.001),
        **arguments,
    )
    return 0, json.loads(json.dumps(run_ranks(num_workers, body)[0]))


@pytest.fixture
def advise(capsys):
    """Runs `allstep advise --measure` on up to two threads; returns what it prints."""

    def run(*arguments: str) -> str:
        flags = ["advise", *arguments, "--measure"]
        assert main(flags, start=start_threads, num_local=(0, 2)) == 0
        return capsys.readouterr().out

    return run


def test_measured_is_put_beside_predicted(advise):
    text = advise(*BARE, "--json", "out.json")
    header = next(line for line in text.splitlines() if line.startswith("workers predicted"))
    assert header.split() == ["workers", "predicted", "measured", "error", "speed", "policy"]
    assert "one worker" in text
    assert "measured here: " in text
    found = json.loads(Path("out.json").read_text())
    assert [(p["workers"], p["policy"]) for p in found["predictions"]] == [
        (1, "fp32"),
        (1, "fp16"),
        (2, "fp32"),
        (2, "fp16"),
    ]
    assert all(p["measured_s"] >= 0.003 for p in found["predictions"])
    assert {p["bucket_bytes"] for p in found["predictions"]} != {"auto"}
    assert "advice: " in text


def test_a_recipe_is_trained_for_real(advise):
    advise("digits", "--workers", "2", "--json", "out.json", "--epochs", "3")
    found = json.loads(Path("out.json").read_text())
    assert found["params"] > 1000
    assert found["total_samples"] == 3 * 1437
    assert all(p["training_s"] > 0 for p in found["predictions"])
    assert {p["workers"] for p in found["predictions"]} == {1, 2}


@pytest.mark.parametrize("code", [1, 130])
def test_a_worker_that_fails_or_is_interrupted_ends_it(code):
    start = lambda num_workers, body, **arguments: (code, None)  # noqa: E731
    assert main(["advise", *BARE, "--measure"], start=start) == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*BARE, "--link", "1gbit"), "`link` (=1gbit) describes machines, `measure` takes those"),
        ((*BARE, "--cluster", "mn-1"), "leave `--cluster` or `--measure` out"),
        ((*BARE, "--workers", "1,64"), "`workers` (=64) exceeds the 2 cores of this machine"),
        ((*BARE, "--workers", "0"), "`workers` (=0) must be at least 1."),
        (BARE[:2], "`step_ms` is missing"),
        (BARE[2:], "`params` is missing"),
        (("--params", "0", *BARE[2:]), "`params` (=0) must be at least 1."),
        ((*BARE, "--noise-scale", "0"), "`noise_scale` (=0) must be at least 1."),
        ((*BARE, "--stragglers", "3"), "`stragglers` (=3) describes machines"),
    ],
)
def test_what_cannot_be_measured_is_one_message(refuse_advice, arguments, message):
    assert message in refuse_advice(*arguments, "--measure", num_local=(0, 2))


def test_a_price_without_a_length_is_refused_before_anything_is_measured(refuse_advice):
    flags = ["--price-per-hour", "3", "--measure"]
    message = refuse_advice(*BARE, *flags, num_local=(0, 2), start=None)
    assert "`price_per_hour` (=3) says what a training costs whose length is known" in message


def test_a_launcher_has_its_own_number_of_workers(refuse_advice, monkeypatch):
    launch = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    launch |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    message = refuse_advice(*BARE, "--measure", "--workers", "4")
    assert "`workers` (=4) contradicts torchrun, which started 2: leave `--workers` out" in message


def test_a_question_is_asked_once_and_answered_by_all():
    """A script is run to know it, and runs of several workers' scripts would meet each other."""
    question = {"recipe": None, "workload": {"num_params": 10}, "global_batch": 96}
    asked_with_s = []

    def work(comm: Communicator):
        def ask():
            asked_with_s.append(comm.timeout_s)
            return question

        return ask_first(comm, ask), comm.timeout_s < 1000

    assert run_ranks(3, work) == [(question, True)] * 3
    assert len(asked_with_s) == 1
    assert asked_with_s[0] > 3600  # the others wait for the script's first steps
