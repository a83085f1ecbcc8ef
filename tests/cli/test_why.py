"""A run that dies or hangs tells why: each fault is real, and `allstep why` names it."""

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import allstep
from allstep.cli.exits import Exits
from allstep.cli.main import main
from allstep.cli.why import Finding, find_cause
from allstep.comm import (
    EXITED,
    FAILED,
    LOST_PEER,
    SIGNALLED,
    TIMED_OUT,
    WELL,
    Activity,
    WorkerState,
    read_states,
    state_folder,
)
from allstep.comm.last_state import LastState
from allstep.comm.places import own_space
from allstep.comm.worker_state import read_state, record_of, waiting_words
from allstep.env import RUN_DIR
from allstep.errors import PeerLostError
from tests.helpers.processes import Workers, start_processes, wait_until

WITHIN_S = 60.0


def train(comm: allstep.Communicator, run_dir: Path, fault: str, at_step: int) -> None:
    """Trains in `steps` until a fault happens on the last rank, for ever without one."""
    log = logging.FileHandler(run_dir / f"log-{comm.rank}")
    logging.getLogger("allstep").addHandler(log)
    model = nn.Linear(2, 1)
    exchange = allstep.attach(model, comm)
    samples = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    with comm.keep_last_state(run_dir, notice_s=1.0):
        for epoch in count():
            loader = allstep.data.loader(samples, comm, global_batch=4, micro_batch=2, seed=epoch)
            for batch in allstep.steps(loader, exchange):
                step = 2 * epoch + batch.step
                for x, y in batch:
                    if comm.rank == comm.size - 1 and step == at_step:
                        FAULTS[fault]()
                    batch.backward((model(x) - y).square().mean())
                model.zero_grad()
                if fault == "none" and step == at_step:
                    return


def divide() -> None:
    raise ZeroDivisionError("on purpose")


def wait_for_test() -> None:
    time.sleep(2 * WITHIN_S)


FAULTS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "raise": divide,
    "segv": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "sleep": wait_for_test,
}


@contextlib.contextmanager
def training(
    run_dir: Path, fault: str, at_step: int = 3, timeout_s: float = 2 * WITHIN_S
) -> Iterator[Workers]:
    with start_processes(2, train, run_dir, fault, at_step, timeout_s=timeout_s) as workers:
        yield workers


def why(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert main(["why", str(run_dir), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.process
@pytest.mark.parametrize(
    ("fault", "what", "words"),
    [
        ("raise", "failed", "failed in forward of step 1: ZeroDivisionError: on purpose"),
        ("segv", "crashed", "got a fatal signal (Segmentation fault) in "),
        ("abort", "crashed", "got a fatal signal (Aborted) in "),
        ("kill", "killed", "is gone without a word, as by kill -9, last seen in "),
    ],
)
def test_a_rank_that_ends_is_named_with_its_cause(tmp_path, capsys, fault, what, words):
    with training(tmp_path, fault) as workers:
        workers.join(WITHIN_S)
        found = why(tmp_path, capsys)
    assert (found["what"], found["rank"]) == (what, 1)
    assert found["words"].startswith(f"rank 1 (process {workers.pids[1]} on ")
    assert words in found["words"]
    assert found["ranks"][0]["end"] == LOST_PEER
    stacks = (state_folder(tmp_path) / "rank-1.txt").read_text(errors="replace")
    assert ("test_why.py" in stacks) == (fault != "kill")


@pytest.mark.process
def test_a_healthy_run_has_ended_well(tmp_path, capsys):
    with training(tmp_path, "none") as workers:
        workers.results(WITHIN_S)
    found = why(tmp_path, capsys)
    assert (found["what"], found["rank"]) == ("ended well", None)
    assert [state["end"] for state in found["ranks"]] == [WELL, WELL]
    assert main(["why", str(tmp_path)]) == 0
    assert "The run ended well" in capsys.readouterr().out


@pytest.mark.process
def test_a_stopped_rank_is_named_while_the_others_wait(tmp_path, capsys):
    with training(tmp_path, "none", at_step=-1) as workers:
        wait_until(lambda: [state.step for state in read_states(tmp_path)] == [1, 1], WITHIN_S)
        assert why(tmp_path, capsys)["what"] == "running"  # the control
        assert "stopped" not in (tmp_path / "log-0").read_text()
        workers.kill(1, signal_number=signal.SIGSTOP)
        wait_until(lambda: why(tmp_path, capsys)["what"] == "stopped", WITHIN_S)
        assert why(tmp_path, capsys)["rank"] == 1
        wait_until(lambda: "stopped" in (tmp_path / "log-0").read_text(), WITHIN_S)
        said = (tmp_path / "log-0").read_text()
        workers.close()
    pid = workers.pids[1]
    assert f"s for rank 1 (process {pid} on " in said
    assert ", which was last seen in " in said
    assert " of step " in said


@pytest.mark.process
def test_a_slow_rank_is_named_by_what_it_does(tmp_path, capsys):
    with training(tmp_path, "sleep") as workers:
        log = tmp_path / "log-0"
        wait_until(lambda: log.exists() and "forward of step 1" in log.read_text(), WITHIN_S)
        found = why(tmp_path, capsys)
        waits = (tmp_path / "log-1").read_text().splitlines()  # for nobody, in that step
        assert [line for line in waits if "rank 0" in line and line.endswith("of step 1")] == []
        workers.close()
    said = log.read_text().splitlines()[-1]
    assert f" s for rank 1 (process {workers.pids[1]} on " in said
    assert said.endswith("), which was last seen in forward of step 1")
    assert found["what"] == "running"


@pytest.mark.process
def test_a_timeout_names_the_rank_that_did_not_come(tmp_path, capsys):
    with training(tmp_path, "sleep", timeout_s=5.0) as workers:
        wait_until(lambda: any(state.end for state in read_states(tmp_path)), WITHIN_S)
        found = why(tmp_path, capsys)
        workers.close()
    assert (found["what"], found["rank"]) == ("timed out", 1)
    assert "rank 0 waited until the timeout for rank 1 (" in found["words"]
    assert "which was in forward of step 1 for " in found["words"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_said(tiny_disk, capsys):
    samples = TensorDataset(torch.ones(8, 100), torch.ones(8, 1000))
    task = allstep.Task(
        model=nn.Linear(100, 1000),
        train_set=samples,
        test_set=samples,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        metrics=lambda model, batch: {"size": (1.0, len(batch[0]))},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    options = allstep.TrainOptions(epochs=1, global_batch=4, micro_batch=2)
    comm = allstep.Communicator.single_process()
    with pytest.raises(allstep.AllstepError):
        allstep.fit(task, options, comm, tiny_disk)
    found = why(tiny_disk, capsys)
    assert (found["what"], found["rank"]) == ("failed", 0)
    assert "failed in checkpoint of step 1: CheckpointError" in found["words"]
    assert "free some space" in found["cure"]


def test_launch_carries_the_run_s_folder_to_the_hosts(capsys):
    options = ["--hosts", "alpha,beta", "--dry-run"]
    assert main(["launch", *options, "--run-dir", "runs/mine", "--", "script.py"]) == 0
    assert capsys.readouterr().out.count(f"{RUN_DIR}=runs/mine ") == 2
    assert main(["launch", *options, "--", "script.py", "--run-dir", "its own"]) == 0
    assert RUN_DIR not in capsys.readouterr().out
    assert main(["launch", *options, "--run-dri", "x", "--", "script.py"]) == 2


def test_without_a_run_the_folder_is_named(tmp_path, capsys):
    assert main(["why", str(tmp_path)]) == 2
    assert "has nothing that its workers left" in capsys.readouterr().err


# -- what is said of states that need hosts, launchers and timeouts ------------------------------


def state(rank: int, **fields: object) -> WorkerState:
    of_another_host = {"host": "beta", "pid": 7, "space": "elsewhere", "seen_s": time.time()}
    return WorkerState(
        **({"rank": rank, "size": 2, "step": 3, "metrics": {}} | of_another_host | fields)
    )


def found(*states: WorkerState, exits: Exits | None = None) -> tuple[str, int | None]:
    finding: Finding = find_cause(states, exits)
    return finding.what, finding.rank


def test_age_of_a_worker_here_whatever_the_date_is() -> None:
    """Of another host there is only the date to compare."""
    here = state(0, space=own_space(), seen_s=time.time() - 7200, seen_monotonic_s=time.monotonic())
    assert here.age_s() < 3600 < dataclasses.replace(here, space="elsewhere").age_s()


def test_a_message_is_looked_up(capsys):
    message = "RuntimeError: [../gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:4711"
    assert main(["why", message]) == 0
    assert capsys.readouterr().out.startswith("Cause: another rank ended\nCure: ")
    assert main(["why", message, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["cause"] == "another rank ended"
    for unknown in ("no such thing at all", "no such thing at all " * 20):
        assert main(["why", unknown]) == 2
        assert "Nor is it a message of the guide" in capsys.readouterr().err


def test_errors_of_connections_say_where_to_look():
    error = PeerLostError("rank 1 closed its connection")
    assert str(error) == "rank 1 closed its connection"
    told = "".join(traceback.format_exception(pickle.loads(pickle.dumps(error))))
    assert told.count("Causes and cures: allstep why RUN") == 1


def test_of_several_errors_the_first_counts_and_lost_peers_do_not():
    now_s = time.time()
    late, early = (state(r, end=FAILED, seen_s=now_s - s) for r, s in ((0, 1), (1, 2)))
    assert found(late, early) == ("failed", 1)
    assert found(state(0, end=LOST_PEER, seen_s=now_s - 9), early) == ("failed", 1)


def test_the_launcher_knows_who_was_killed_and_whom_it_killed_itself():
    states = state(0, end=LOST_PEER, pid=7), state(1, pid=8)
    exits = Exits([75, -9], 1, [], pids=[7, 8])
    assert found(*states, exits=exits) == ("killed", 1)
    assert found(*states, exits=dataclasses.replace(exits, killed=[1])) == ("stopped", 1)
    assert found(states[0], exits=exits) == ("killed", 1)  # it left nothing
    own = find_cause(states, dataclasses.replace(exits, codes=[75, -40]))
    assert "was killed by signal 40" in own.words  # that has no name


def test_workers_that_went_on_without_others_have_other_ranks_than_their_launcher_knows():
    exits = Exits([-9, -9, -15], 2, [], pids=[7, 8, 9])
    finding = find_cause([state(0, pid=100), state(1, pid=9)], exits)  # process 100 has joined
    assert (finding.what, finding.rank) == ("killed", 1)
    assert finding.words.startswith("rank 1 (process 9 on beta) was killed by SIGTERM")
    others = state(0, pid=100, end=LOST_PEER), state(1, pid=9, end=LOST_PEER)
    lost_before = dataclasses.replace(exits, first=0)
    assert found(*others, exits=lost_before) == ("unknown", 0)


def test_a_lost_host_a_timeout_and_a_signal():
    gone = state(1, seen_s=time.time() - 3600)
    assert found(state(0, end=TIMED_OUT), gone) == ("lost", 1)
    assert found(state(0), state(1)) == ("running", None)
    slow = state(1, end=SIGNALLED, phase="data", phase_s=300)
    assert found(state(0, end=TIMED_OUT), slow) == ("timed out", 1)
    assert found(state(0, end=SIGNALLED), state(1, end=SIGNALLED)) == ("signalled", 0)
    assert found(state(0, end=WELL), state(1, end=WELL)) == ("ended well", None)


def test_the_one_who_does_not_wait_is_waited_for():
    states = {1: state(1, call="all_reduce"), 2: state(2, phase="data")}
    words = waiting_words(5, [1, 2, 3], states, "rank {}".format)
    assert words == "waiting 5 s for rank 2, which was last seen in data of step 3"
    states[2] = state(2, call="all_reduce", seen_s=time.time() - 60)  # stopped as it waited
    assert "rank 2, which was last seen in `all_reduce`" in waiting_words(
        5, [1, 2], states, "rank {}".format
    )


def test_a_record_stays_whole_whatever_the_error_says(tmp_path):
    kept = LastState(tmp_path, Activity(), 0, 1, str).start()
    kept.end(FAILED, "\N{SNOWMAN}" * 10_000)
    (left,) = read_states(tmp_path)
    assert set(left.message) == {"\N{SNOWMAN}"}
    assert "test_why.py" in left.stacks


def test_a_worker_that_ends_while_its_file_is_read_was_not_killed():
    """It was in the midst of a step when the file was read, and is gone by the next look."""
    gone = dataclasses.replace(state(0), space=own_space(), pid=2**22 + 1, born="1")

    class File:
        contents = iter([record_of(gone), record_of(dataclasses.replace(gone, end=WELL))])

        def read_bytes(self) -> bytes:
            return next(self.contents)

    assert find_cause([gone], None).what == "killed"
    left = read_state(File())  # type: ignore[arg-type]
    assert find_cause([left], None).what == "ended well"


def test_what_an_earlier_part_of_the_run_left_is_no_news(tmp_path):
    for rank in range(2):
        LastState(tmp_path, Activity(), rank, 2, str).start().end(WELL)
    file = state_folder(tmp_path) / "rank-1.txt"
    old = dataclasses.replace(read_states(tmp_path)[1], start_s=0.0, seen_s=time.time() - 3600)
    assert len(read_states(tmp_path)) == 2
    file.write_bytes(record_of(old))
    assert [state.rank for state in read_states(tmp_path)] == [0]


def test_a_clock_that_is_set_back_makes_no_earlier_part(tmp_path):
    LastState(tmp_path, Activity(), 0, 1, str).start().end(WELL)
    (left,) = read_states(tmp_path)
    set_back = dataclasses.replace(left, seen_s=left.seen_s - 3600)
    (state_folder(tmp_path) / "rank-0.txt").write_bytes(record_of(set_back))
    assert read_states(tmp_path) == [set_back]


def test_fewer_workers_leave_nothing_of_the_others(tmp_path):
    for size in (2, 1):
        for rank in range(size):
            LastState(tmp_path, Activity(), rank, size, str).start().end(WELL)
    assert [state.rank for state in read_states(tmp_path)] == [0]


def test_files_of_workers_that_change(tmp_path):
    """Of three one is lost; then another joins, which has no file while it waits."""
    lost, *others = (LastState(tmp_path, Activity(), rank, 3, str).start() for rank in range(3))
    joiner = LastState(tmp_path, Activity(), -1, 0, str).start()
    assert [(s.rank, s.size) for s in read_states(tmp_path)] == [(0, 3), (1, 3), (2, 3)]
    for rank, kept in enumerate(others):
        kept.move(rank, 2, str)
    assert [(s.rank, s.size) for s in read_states(tmp_path)] == [(0, 2), (1, 2)]
    lost.end(FAILED, "it says so in a file that nobody reads any more")
    for rank, kept in enumerate([*others, joiner]):
        kept.move(rank, 3, str)
        kept.end(WELL)
        kept.move(0, 1, str)  # what has ended stays as it was
    assert [(s.rank, s.size, s.end) for s in read_states(tmp_path)] == [
        (0, 3, WELL),
        (1, 3, WELL),
        (2, 3, WELL),
    ]


# -- own scripts, with `init(run_dir=...)` -------------------------------------------------------

_SCRIPT = """
import sys, allstep
comm = allstep.init(device="cpu")
comm.activity.enter("forward", 3)
{}
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("last_lines", "end", "words"),
    [
        ("raise ValueError('on purpose')", FAILED, "in forward of step 3: ValueError: on purpose"),
        pytest.param(
            "with comm: 1 / 0",
            FAILED,
            "in forward of step 3: ZeroDivisionError",
            marks=pytest.mark.slow,
        ),
        pytest.param("comm.close()", WELL, "ended well", marks=pytest.mark.slow),
        ("", EXITED, "ended without `close`"),
    ],
)
def test_an_own_script_leaves_how_it_ended(tmp_path, capsys, last_lines, end, words):
    environ = os.environ | {RUN_DIR: str(tmp_path)}
    line = [sys.executable, "-c", _SCRIPT.format(last_lines)]
    subprocess.run(line, env=environ, capture_output=True, timeout=WITHIN_S)
    (left,) = read_states(tmp_path)
    assert left.end == end
    assert words in why(tmp_path, capsys)["words"]
