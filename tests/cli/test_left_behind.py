"""What a worker that is lost leaves behind ends at once, while the others go on."""

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from allstep.cli.launch import Watch
from allstep.files import write_whole
from tests.helpers.processes import Workers

_LIMIT_S = 60.0


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def leave_a_process_or_look(folder: Path) -> bool:
    """Rank 1 starts a process and fails; rank 0 returns whether that has been ended."""
    note = folder / "pid"
    if os.environ["RANK"] == "1":
        write_whole(note, str(subprocess.Popen(["sleep", "600"]).pid))
        os._exit(3)
    deadline_s = time.monotonic() + _LIMIT_S
    while not note.exists() or is_running(int(note.read_text())):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.process
def test_processes_of_a_lost_worker_end_while_the_others_go_on(tmp_path: Path) -> None:
    with Workers(2, leave_a_process_or_look, (tmp_path,), min_workers=1) as workers:
        watch = Watch(workers, [])
        while not watch.look(0.05):
            pass
        outcomes = workers.outcomes()
    assert watch.failed == [1] and workers.exit_codes[1] == 3
    assert outcomes[0].value is True
