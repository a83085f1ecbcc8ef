"""The runner of user scripts: what a script finds, how it is left, and the watchdog."""

import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

import allstep
from allstep.doctor.script import ScriptRunner, Watchdog


class Attached:
    """An observer that notes what is attached."""

    num_events = 0

    def see_mesh(self, mesh):
        pass

    def __init__(self, then=lambda: None):
        self.models = []
        self.is_closed = False
        self._then = then

    def attach(self, attach, model, *args, **options):
        self.models.append(model)
        self._then()
        return attach(model, *args, **options)

    def close(self):
        self.is_closed = True


@pytest.fixture
def run(tmp_path):
    """Runs a script; returns its failure, what was reported, and the waits for others."""

    def run(text, *arguments, observer=None, enough=False):
        script = tmp_path / "train.py"
        script.write_text(dedent(text))
        reports, meetings = [], []
        runner = ScriptRunner(script, arguments, 100.0, reports.append, meetings.append)
        observer = observer or Attached(then=runner.stop if enough else lambda: None)
        failure = runner.run(observer)
        assert observer.is_closed
        return failure, reports, meetings

    return run


ATTACHES = """
    from pathlib import Path

    from torch import nn
    import allstep

    comm = allstep.init(device="cpu")
    try:
        allstep.attach(nn.Linear(1, 1), comm)
        Path("went-on").touch()
    finally:
        Path("tidied").touch()
"""


def test_a_script_runs_as_main_with_its_own_arguments(run, tmp_path):
    (tmp_path / "beside_it.py").write_text("value = 3")
    argv, path = sys.argv, list(sys.path)
    failure, reports, meetings = run(
        """
        import sys, beside_it
        assert __name__ == "__main__" and __file__ == sys.argv[0]
        assert sys.argv[1:] == ["--epochs", "3", "--", "x"] and beside_it.value == 3
        """,
        *("--epochs", "3", "--", "x"),
    )
    assert (failure, reports, meetings) == (None, [None], [])
    assert (sys.argv, sys.path) == (argv, path)


@pytest.mark.parametrize("enough", [False, True])
def test_attach_is_the_observers_until_the_script_ends(run, tmp_path, monkeypatch, enough):
    monkeypatch.chdir(tmp_path)
    attach = allstep.exchange.attach
    failure, reports, meetings = run(ATTACHES, enough=enough)
    assert (failure, reports) == (None, [None])
    assert Path("tidied").exists()
    assert Path("went-on").exists() is not enough
    assert len(meetings) == enough  # others may still need a worker that has seen enough
    assert allstep.exchange.attach is attach


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("1 / 0", "error", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "exit", "3"),
        ("raise allstep.errors.PeerLostError('gone')", "error", "gone"),
    ],
)
def test_failures_are_reported_once(run, text, kind, said):
    failure, reports, meetings = run(f"import allstep\n{text}")
    assert reports == [failure]
    assert (failure.kind, failure.is_own) == (kind, "PeerLost" not in text)
    assert said in failure.text
    assert "runpy" not in failure.text  # only the script's own frames
    assert meetings == []


@pytest.mark.parametrize("code", ["", "0"])
def test_an_exit_without_a_code_is_no_failure(run, code):
    assert run(f"import sys; sys.exit({code})") == (None, [None], [])


# -- the watchdog --------------------------------------------------------------------------------


def wait_for(codes: list[int]) -> int:
    deadline_s = time.monotonic() + 30
    while not codes and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return codes[0]


def test_no_progress_ends_the_process_and_says_where():
    codes, places = [], []
    watchdog = Watchdog(0.3, places.append, end=codes.append)
    watchdog.start(lambda: 0)
    assert wait_for(codes) == 1
    assert "wait_for" in {frame.name for frame in places[0]}


def test_progress_keeps_the_process_alive_and_stop_ends_the_watch():
    codes = []
    start_s = time.monotonic()
    watchdog = Watchdog(0.5, lambda place: None, end=codes.append)
    watchdog.start(lambda: int(100 * (time.monotonic() - start_s)))
    time.sleep(0.8)
    watchdog.stop()
    assert codes == []


def test_tidying_up_after_the_report_is_cut_short():
    codes = []
    watchdog = Watchdog(1000.0, lambda place: None, tidy_s=0.1, end=codes.append)
    watchdog.expect_end()
    watchdog.start(lambda: 0)
    assert wait_for(codes) == 0


def test_a_process_ends_with_its_launcher():
    codes, parents = [], iter([7, 7, 1])
    watchdog = Watchdog(
        1000.0, lambda place: None, end=codes.append, parent=lambda: next(parents, 1)
    )
    watchdog.start(lambda: 0)
    assert wait_for(codes) == 1
