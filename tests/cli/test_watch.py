"""`allstep watch` shows what a run's folder says, of real trainings too, and leaves them alone."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from allstep.cli.main import main
from allstep.cli.run_folder import write_recipe
from allstep.cli.train import train_worker
from allstep.comm import LOST_PEER, WELL, Activity, WorkerState, read_states, state_folder
from allstep.comm.last_state import LastState
from allstep.comm.worker_state import record_of
from allstep.recipes import find_recipe
from tests.helpers.launched import Launched
from tests.helpers.processes import Workers, start_processes, wait_until
from tests.helpers.terminal import Terminal

RUN_S = 100.0
TRAIN = ["digits", "--workers", 2, "--run-dir", "run", "--width", 8, "--epochs", 2]
STRAGGLER = "rank 1 is 1.5x slower than the median: data, 30 ms a step, not 10 (try more loaders)"
UP, SHOWN_CURSOR = "\x1b[1A", "\x1b[?25h"


def no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch):
    """What is printed does not depend on the caller's terminal."""
    for name in ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def watched(capsys):
    """What `allstep watch RUN --json` prints."""

    def run(run_dir: Path) -> dict:
        capsys.readouterr()
        assert main(["watch", str(run_dir), "--json"]) == 0
        return json.loads(capsys.readouterr().out, parse_constant=no_json)

    return run


@pytest.fixture
def printed(capsys):
    """What is printed where there is no terminal."""

    def run(run_dir: Path) -> str:
        capsys.readouterr()
        assert main(["watch", str(run_dir)]) == 0
        return capsys.readouterr().out

    return run


def on_terminal(run_dir: Path, sleep: Callable[[float], None]) -> tuple[int, str]:
    """Exit code, and what a terminal gets; `sleep` is called between two looks."""
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=120, height=30, highlight=False)
    code = main(["watch", str(run_dir), "--interval-s", "0.25"], console=console, sleep=sleep)
    return code, terminal.getvalue()


def is_under_way(run_dir: Path) -> bool:
    states = read_states(run_dir)
    return len(states) == 2 and all(state.step and state.compute_s for state in states)


# -- real trainings ------------------------------------------------------------------------------


def names_of(run_dir: Path) -> set[str]:
    files = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*")}
    return {name for name in files if "events.out" not in name}  # the host and the time are in it


def tensors_of(run_dir: Path, step: int) -> bytes:
    return (run_dir / f"checkpoints/step-{step:08d}/tensors.safetensors").read_bytes()


@contextmanager
def training(run_dir: Path, **fields: int) -> Iterator[Workers]:
    """What `allstep train digits --workers 2` runs in its processes."""
    run_dir.mkdir()
    write_recipe(run_dir, find_recipe("digits")(width=8, log_every_steps=1, **fields))
    with start_processes(2, train_worker, str(run_dir), False) as workers:
        yield workers


@pytest.mark.process
@pytest.mark.slow
def test_a_watched_training_is_the_same_bit_for_bit(tmp_path, watched):
    views: list[dict] = []
    short = {"epochs": 2, "global_batch": 480, "checkpoint_every_steps": 3}

    def sees_its_end() -> bool:
        views.append(watched(tmp_path / "watched"))
        return views[-1]["is_over"]

    with training(tmp_path / "watched", **short) as workers:
        wait_until(sees_its_end, RUN_S)
        workers.results(RUN_S)
    with training(tmp_path / "alone", **short) as workers:
        workers.results(RUN_S)
    assert [view["what"] for view in views[-2:]] == ["running", "ended well"]
    assert (views[-1]["step"], views[-1]["num_total_steps"]) == (6, 6)
    assert tensors_of(tmp_path / "watched", 6) == tensors_of(tmp_path / "alone", 6)
    assert tensors_of(tmp_path / "watched", 3) != tensors_of(tmp_path / "alone", 6)  # the control
    assert names_of(tmp_path / "watched") == names_of(tmp_path / "alone")


@pytest.mark.process
def test_a_training_is_shown_until_a_worker_is_killed(tmp_path, watched, printed):
    run_dir = tmp_path / "run"
    with training(run_dir, epochs=200) as workers:
        wait_until(lambda: is_under_way(run_dir), RUN_S)
        first = watched(run_dir)
        assert (first["what"], first["is_over"]) == ("running", False)
        assert (first["recipe"], first["epochs"], first["num_total_steps"]) == ("digits", 200, 3000)
        assert [row["pid"] for row in first["ranks"]] == workers.pids
        assert all(row["data_s"] > 0 and row["wait_s"] > 0 for row in first["ranks"])
        wait_until(lambda: watched(run_dir)["step"] > first["step"], RUN_S)
        wait_until(lambda: watched(run_dir)["time_left_s"], RUN_S)

        looks: list[float] = []
        code, shown = on_terminal(run_dir, lambda s: looks.append(s) or stop_after(3, looks))
        assert code == 128 + signal.SIGINT
        assert looks == [0.25] * 3
        assert UP in shown and shown.rstrip().endswith(SHOWN_CURSOR)
        assert "/3,000" in shown and "samples/s" in shown and " left" in shown
        assert workers.exit_codes == [None, None]  # they go on

        workers.kill(1, signal_number=signal.SIGSTOP)
        wait_until(lambda: watched(run_dir)["what"] == "stopped", RUN_S)
        assert not watched(run_dir)["is_over"]
        assert "stopped, last seen in " in printed(run_dir)
        workers.kill(1)
        wait_until(lambda: watched(run_dir)["is_over"], RUN_S)
        last = watched(run_dir)
    assert (last["what"], last["rank"], last["time_left_s"]) == ("killed", 1, None)
    assert [row["end"] for row in last["ranks"]] == [LOST_PEER, None]
    text = printed(run_dir)
    assert f"More: allstep why {run_dir}" in text
    assert "gone, last seen in " in text
    assert on_terminal(run_dir, lambda _: pytest.fail("it is over"))[0] == 0


def stop_after(num: int, looks: list[float]) -> None:
    if len(looks) == num:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(RUN_S)


def train_and_watch(folder: Path) -> tuple[Launched, str]:
    """`allstep train`, and what `allstep watch` shows of it on a terminal until it is over."""
    train = Launched("-m", "allstep", "train", *TRAIN, cwd=folder)
    train.wait_until((folder / "run/recipe.json").exists)
    master, slave = os.openpty()
    line = [sys.executable, "-m", "allstep", "watch", "run"]
    watch = subprocess.Popen(line, stdout=slave, stderr=slave, cwd=folder)
    os.close(slave)
    shown = b""
    with open(master, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # its end
        while part := terminal.read(1000):
            shown += part
    assert watch.wait(RUN_S) == 0
    train.finish(RUN_S)
    return train, shown.decode()


@pytest.mark.process
@pytest.mark.slow
def test_the_commands_themselves(tmp_path):
    train, shown = train_and_watch(tmp_path)
    assert train.code == 0
    assert "step 30/30" in shown and "The run ended well" in shown
    piped = Launched("-m", "allstep", "watch", "run", cwd=tmp_path)
    piped.finish(RUN_S)
    assert (piped.code, piped.errors) == (0, "")
    assert piped.output.count("The run ended well") == 1
    assert "\x1b" not in piped.output


# -- what is made of what stands in a folder -----------------------------------------------------


def state(rank: int, **fields: object) -> WorkerState:
    """Of a worker on another host, that is well."""
    now_s = time.time()
    known = {"host": f"host{rank}", "pid": 7, "space": "elsewhere", "seen_s": now_s + RUN_S}
    known |= {"size": 2, "step": 7, "phase": "forward", "phase_s": 0.25, "metrics": {}}
    known |= {"start_s": now_s - 100, "data_s": 0.01, "compute_s": 0.03, "wait_s": 0.0}
    return WorkerState(**(known | {"rank": rank, "num_total_steps": 100} | fields))


def leave(run_dir: Path, *states: WorkerState, name: str | None = "digits") -> None:
    """What workers leave, and `allstep train` where it names a recipe."""
    state_folder(run_dir).mkdir(parents=True, exist_ok=True)
    if name is not None:
        recipe = {"recipe": name, "allstep": "0", "fields": {"epochs": 4}}
        (run_dir / "recipe.json").write_text(json.dumps(recipe))
    for each in states:
        (state_folder(run_dir) / f"rank-{each.rank}.txt").write_bytes(record_of(each))


def log(run_dir: Path, *lines: dict) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"epoch": 1} | line) + "\n" for line in lines)


def line(step: int, loss: float | None, time_s: float, **others: object) -> dict:
    return {"step": step, "loss": loss, "samples_per_s": 50.0, "time": time_s} | others


def test_progress_and_workers(tmp_path, printed, watched):
    now_s = time.time()
    leave(
        tmp_path, state(0, straggler=STRAGGLER), state(1, call="exchange", call_s=75.0, wait_s=0.06)
    )
    parts = {"micro_batches/rank_0": 3, "micro_batches/rank_1": 1}
    log(tmp_path, *(line(step, 4.0 - step, now_s - 9 + 2 * step, **parts) for step in (1, 2, 3)))
    text = printed(tmp_path)
    head, progress, straggler, titles, *rows = [" ".join(row.split()) for row in text.splitlines()]
    assert head == f"digits {tmp_path}"
    assert progress == ("epoch 2/4 step 7/100 loss 1.0000 █▄▁ 50 samples/s 0:03:06 left")
    assert straggler == STRAGGLER.replace("rank", "Rank", 1)
    assert titles == "rank host doing for micro-batches data compute wait"
    assert rows == [
        "0 host0 forward of step 7 0.2 s 3 25% 75% 0%",
        "1 host1 forward of step 7, waits in `exchange` 0:01:15 1 10% 30% 60%",
    ]
    found = watched(tmp_path)
    assert found["time_left_s"] == pytest.approx(2.0 * (100 - 7))
    assert {key: value for key, value in found.items() if key not in ("ranks", "time_left_s")} == {
        "run": str(tmp_path),
        "recipe": "digits",
        "what": "running",
        "rank": None,
        "words": "The run goes on; rank 0 (process 7 on host0) is in forward of step 7.",
        "cure": "",
        "is_over": False,
        "step": 7,
        "num_total_steps": 100,
        "epoch": 1,
        "epochs": 4,
        "loss": 1.0,
        "losses": [3.0, 2.0, 1.0],
        "samples_per_s": 50.0,
        "micro_batches": [3, 1],
        "straggler": STRAGGLER,
    }
    fields = {field.name for field in dataclasses.fields(WorkerState)}
    assert [set(row) for row in found["ranks"]] == [fields | {"process_state"}] * 2


def test_a_loss_that_is_not_finite_is_json_all_the_same(tmp_path, printed, watched):
    leave(tmp_path, state(0, metrics={"loss": float("nan")}), state(1))
    log(tmp_path, line(1, 2.0, 1.0), line(2, None, 2.0, non_finite={"loss": "nan"}))
    found = watched(tmp_path)
    assert (found["loss"], found["losses"]) == (None, [2.0, None])
    assert found["ranks"][0]["metrics"] == {"loss": None}
    assert "loss nan ▁?" in printed(tmp_path)


@pytest.mark.parametrize("name", ["epoch", "time", "micro_batches/rank_0"])
def test_a_place_in_the_run_that_is_not_finite(tmp_path, printed, watched, name):
    """As a script may write it, or a file that was damaged."""
    leave(tmp_path, state(0), state(1))
    for number in (float("nan"), float("inf")):
        last = line(2, 1.0, time.time()) | {name: number}
        log(tmp_path, line(1, 2.0, time.time()), last)
        assert watched(tmp_path)["epoch"] == 1
        assert "epoch 2/4" in printed(tmp_path)
    assert watched(tmp_path)["micro_batches"] == []


def test_a_terminal_without_pictures_gets_none(tmp_path):
    leave(tmp_path, state(0), state(1))
    log(tmp_path, line(1, 2.0, 1.0), line(2, 1.0, 2.0))
    shown = {}
    for encoding in ("ascii", "utf-8"):
        with io.TextIOWrapper(io.BytesIO(), encoding) as file:
            assert main(["watch", str(tmp_path)], console=Console(file=file, width=100)) == 0
            file.flush()
            shown[encoding] = file.buffer.getvalue().decode()
    assert "loss 1.0000  50 samples/s" in shown["ascii"]
    assert "loss 1.0000 █▁  50 samples/s" in shown["utf-8"]  # the control


def test_steps_that_a_resumed_run_makes_again_are_not_shown(tmp_path, watched):
    now_s = time.time()
    leave(tmp_path, state(0), state(1))
    log(tmp_path, *(line(step, float(step), now_s - 1000) for step in (6, 7, 8, 30)))
    assert (watched(tmp_path)["losses"], watched(tmp_path)["step"]) == ([6.0, 7.0], 7)
    assert watched(tmp_path)["time_left_s"] is None  # of this part nothing is logged yet
    log(tmp_path, line(8, 80.0, now_s))
    assert (watched(tmp_path)["losses"], watched(tmp_path)["step"]) == ([6.0, 7.0, 80.0], 8)


def test_a_run_that_starts(tmp_path, printed, watched):
    leave(tmp_path)
    head, words, *others = printed(tmp_path).splitlines()
    assert (head, others) == (f"digits  {tmp_path}", [])
    assert words.startswith("No worker has left anything here yet.")
    found = watched(tmp_path)
    assert (found["what"], found["is_over"], found["ranks"]) == ("not begun", False, [])


def test_a_run_that_has_left_its_report_only(tmp_path, printed, watched):
    """As a copy without the workers' files."""
    write_recipe(tmp_path, find_recipe("digits")())
    (tmp_path / "report.json").write_text("{}")
    view = watched(tmp_path)
    assert (view["what"], view["is_over"]) == ("unknown", True)
    text = printed(tmp_path)
    assert "The run is over: what it came to is in its report.json" in text
    assert "allstep why" not in text  # which has nothing to read


def test_workers_that_are_not_there(tmp_path, printed, watched):
    leave(tmp_path, state(0, size=3), state(2, size=3, seen_s=time.time() - 30))
    text = printed(tmp_path)
    assert "left nothing here" in text
    assert "no sign, last seen in forward of step 7" in text
    assert not watched(tmp_path)["is_over"]


def test_workers_of_a_host_that_is_lost_are_not_awaited(tmp_path, watched):
    past = {"seen_s": time.time() - 3600, "start_s": time.time() - 7200}
    leave(tmp_path, state(0, end=LOST_PEER, **past), state(1, **past))
    assert (watched(tmp_path)["what"], watched(tmp_path)["is_over"]) == ("lost", True)


def test_an_own_script_needs_no_recipe(tmp_path, printed):
    leave(tmp_path, state(0), state(1), name=None)
    assert printed(tmp_path).startswith(f"own script  {tmp_path}\nstep 7/100\n")


def test_what_a_worker_notes_comes_here(tmp_path, watched):
    activity = Activity()
    activity.enter("forward", 3)
    activity.note_times(0.5, 1.0, 0.25)
    activity.straggler, activity.num_total_steps = STRAGGLER, 9
    LastState(tmp_path, activity, 0, 1, str).start().end(WELL)
    found = watched(tmp_path)
    (row,) = found["ranks"]
    assert (row["data_s"], row["compute_s"], row["wait_s"]) == (0.5, 1.0, 0.25)
    assert (found["step"], found["num_total_steps"], found["straggler"]) == (3, 9, STRAGGLER)
    LastState(tmp_path, Activity(), 0, 1, str).start().end(WELL)
    assert (watched(tmp_path)["step"], watched(tmp_path)["straggler"]) == (None, "")


def test_a_terminal_is_drawn_in_place_until_the_run_ends(tmp_path):
    kept = [LastState(tmp_path, Activity(), rank, 2, str).start() for rank in range(2)]
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            for each in kept:
                each.end(WELL)

    code, shown = on_terminal(tmp_path, sleep)
    assert (code, len(looks)) == (0, 2)
    assert UP in shown and shown.rstrip().endswith(SHOWN_CURSOR)
    assert "The run ended well" in shown
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=120, highlight=False)
    assert main(["watch", str(tmp_path), "--once"], console=console) == 0
    assert UP not in terminal.getvalue()  # the control


@pytest.mark.parametrize(
    ("interval", "words"),
    [("0", "above 0"), ("-1", "above 0"), ("nan", "above 0"), ("1e12", "at most 3600")],
)
def test_an_interval_that_is_none(tmp_path, refused, interval, words):
    leave(tmp_path, state(0), state(1))
    message = refused("watch", str(tmp_path), f"--interval-s={interval}")
    assert message.startswith("error: `interval_s` (=") and words in message
