"""One training at a time in a run's folder."""

import errno
import fcntl
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import allstep
from allstep import Communicator
from allstep.errors import UsageError
from allstep.train.run_lock import run_lock, trainer_of
from tests.helpers import same_model
from tests.helpers.ranks import run_ranks

HOLD = """
import os, sys, time
from pathlib import Path
from allstep import Communicator
from allstep.train.run_lock import run_lock
with run_lock(Path(sys.argv[1]), Communicator.single_process()):
    if os.fork() == 0:  # as a loader's process, which may live longer
        os.close(1)
        time.sleep(600)
        os._exit(0)
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that trains in `tmp_path`, with a child of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, 9)
    process.wait()
    process.stdout.close()


@pytest.mark.process
def test_a_second_training_in_a_folder_is_refused_until_the_first_is_dead(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    def fit(comm: Communicator) -> str:
        options = replace(same_model.OPTIONS, epochs=1)
        try:
            allstep.fit(same_model.make_task("sgd"), options, comm, tmp_path)
        except UsageError as error:
            return str(error)
        return "trained"

    name = f"process {other.pid} on {socket.gethostname()}"
    assert trainer_of(tmp_path) == name
    assert trainer_of(tmp_path) == name  # looking does not let go of it
    for message in run_ranks(2, fit):
        assert re.match(rf"`run_dir` \(={tmp_path}\) is being trained by {name}: ", message)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    other.kill()
    other.wait()
    assert trainer_of(tmp_path) is None
    assert run_ranks(2, fit) == ["trained"] * 2
    assert trainer_of(tmp_path) is None


def test_a_run_lock_is_held_within_a_process_too(tmp_path: Path) -> None:
    comm = Communicator.single_process()
    this = f"process {os.getpid()} on {socket.gethostname()}"
    with run_lock(tmp_path, comm):
        with pytest.raises(UsageError, match=this), run_lock(tmp_path / ".." / tmp_path.name, comm):
            pass
        assert trainer_of(tmp_path) == this
    assert trainer_of(tmp_path) is None
    with run_lock(tmp_path, comm):
        pass


def test_a_file_system_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with (
        caplog.at_level(logging.WARNING),
        run_lock(tmp_path, Communicator.single_process()),
    ):
        assert "can't be locked (No locks available)" in caplog.text


def test_a_run_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with (
        pytest.raises(UsageError, match=r"`run_dir` \(=.*run\) can't be written \(File exists\)"),
        run_lock(tmp_path / "run", Communicator.single_process()),
    ):
        pass
