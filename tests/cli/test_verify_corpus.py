"""`allstep verify` on sound scripts and on silent bugs: what it names, and that it blames no other.

Each script runs in real processes, which are forked from one that has imported torch.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from allstep.cli.main import main
from tests.helpers.scripts import load_script

FOLDER = Path(__file__).parents[1] / "verify_scripts"
FASHION = Path("/usr/share/datasets/fashion-mnist")
_PRELOAD = ["allstep.cli.script_worker", "torch._dynamo", "sklearn.datasets", "pytest"]


CASES = load_script(FOLDER / "cases.py")

# Bugs of several kinds of evidence, and sound scripts in which rounding grows.
QUICK = ["lstm_with_state", "seed_by_rank", "means_of_tokens", "averages_again"]


def launch(asked):
    with replace(asked, preload=_PRELOAD) as workers:
        while not workers.wait(60.0):
            pass
        return max(map(abs, workers.exit_codes))


def run(name: str, size: int, num_steps: int) -> int:
    flags = ["-n", f"1,{size}", "--steps", str(num_steps), "--json"]
    return main(["verify", str(FOLDER / "corpus.py"), *flags, "--", name], launch=launch)


def result_of(name: str, capsys, *, size: int = 2, num_steps: int = 10) -> dict:
    """What `allstep verify` finds."""
    code = run(name, size, num_steps)
    printed = capsys.readouterr()
    assert printed.out, printed.err
    (found,) = json.loads(printed.out)["results"]
    assert code == (0 if found["is_same"] else 1)
    return found


def check(name: str, found: dict) -> None:
    names = [cause["name"] for cause in found["causes"]]
    if name in CASES.SOUND:
        assert (found["is_same"], found["divergence"], names) == (True, None, [])
    else:
        assert (found["is_same"], names) == (False, [CASES.BUGS[name][0]])


@pytest.mark.process
@pytest.mark.parametrize("name", QUICK)
def test_verify_on_some_of_the_scripts(name, capsys):
    check(name, result_of(name, capsys))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "gone_without"),
    [("mnist_steps_high_rate", 3, "order of sums"), ("cnn_high_rate", 2, "float32")],
)
def test_verify_tells_amplified_rounding_from_a_mistake(name, size, gone_without, capsys):
    """PyTorch's MNIST example: conv net, Adadelta, StepLR; with dropout in `steps`."""
    found = result_of(name, capsys, size=size, num_steps=44)
    check(name, found)
    assert max(found["differences"]) > found["limit"]  # else the test shows nothing
    rounding = found["rounding"]
    assert rounding["vanishes_without"] == gone_without
    assert 0 < rounding["at_first"] < 1e-6
    assert 1.1 < rounding["growth"] < 4
    assert rounding["divergence"]["step"] < rounding["unrelated_at"] < 100


@pytest.mark.long
@pytest.mark.process
@pytest.mark.skipif(not FASHION.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_verify_on_the_mnist_example_at_full_size(capsys):
    """Rate 1.0; `verify` once took it for random numbers of the worker."""
    found = result_of("fashion_steps", capsys, size=3, num_steps=12)
    assert (found["is_same"], found["causes"]) == (True, [])
    assert max(found["differences"]) > found["limit"]
    assert found["rounding"]["vanishes_without"] == "order of sums"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", CASES.REFUSED)
def test_verify_says_what_the_exchange_finds_itself(name, capsys):
    assert run(name, 2, 10) == 2
    assert CASES.REFUSED[name][0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", sorted({*CASES.SOUND, *CASES.BUGS} - {*QUICK}))
def test_verify_on_all_scripts(name, capsys):
    check(name, result_of(name, capsys))


def test_corpus_has_thirty_scripts_of_each_kind():
    assert len(CASES.SOUND) >= 30
    assert len(CASES.BUGS) >= 30
