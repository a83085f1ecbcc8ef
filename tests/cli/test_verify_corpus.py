"""`allstep verify` on sound scripts and on silent bugs: what it names, and that it blames no other.

Each script runs in real processes, which are forked from one that has imported torch.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from allstep.cli.launch import Workers
from allstep.cli.main import main

FOLDER = Path(__file__).parents[1] / "verify_scripts"
_PRELOAD = ["allstep.cli.script_worker", "torch._dynamo", "sklearn.datasets", "pytest"]


def load_corpus():
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("verify_corpus", FOLDER / "corpus.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))


CORPUS = load_corpus()

# A bug of each kind of evidence, and the sound scripts that were blamed before.
QUICK = ["mnist_steps", "lstm_with_state", "seed_by_rank", "means_of_tokens", "averages_again"]


def launch(size, function, folder, asked, *, has_logs):
    with Workers(size, function, folder, asked, preload=_PRELOAD, has_logs=has_logs) as workers:
        while not workers.wait(60.0):
            pass
        return max(map(abs, workers.exit_codes))


def verdict(name: str, capsys, size: int = 2, num_steps: int = 10) -> dict:
    """What `allstep verify` finds; with its exit code."""
    flags = ["-n", f"1,{size}", "--steps", str(num_steps), "--json"]
    code = main(["verify", str(FOLDER / "corpus.py"), *flags, "--", name], launch=launch)
    printed = capsys.readouterr()
    assert printed.out, printed.err
    (found,) = json.loads(printed.out)["verdicts"]
    assert code == (0 if found["is_same"] else 1)
    return found


def check(name: str, found: dict) -> None:
    names = [cause["name"] for cause in found["causes"]]
    if name in CORPUS.SOUND:
        assert (found["is_same"], names) == (True, [])
    else:
        assert names == [CORPUS.BUGS[name][0]]


@pytest.mark.process
@pytest.mark.parametrize("name", QUICK)
def test_verify_on_some_of_the_scripts(name, capsys):
    check(name, verdict(name, capsys))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", sorted({*CORPUS.SOUND, *CORPUS.BUGS} - {*QUICK}))
def test_verify_on_all_scripts(name, capsys):
    check(name, verdict(name, capsys))
