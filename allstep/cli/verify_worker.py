"""`allstep verify_worker`: what `verify` starts, once for each worker; not for people.

It imports nothing that takes `attach` from its room before `record_script` has put another in.
"""

import json
import multiprocessing
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch

from allstep.doctor.verify import Task, record_script
from allstep.env import read_launch, read_num_threads

__all__ = ["log_path", "run", "write_task"]

_TASK = "task.json"


def write_task(task: Task) -> list[str]:
    """Leaves a task in its folder; returns what makes Python a worker that does it."""
    plain = {**asdict(task), "script": str(task.script), "folder": str(task.folder)}
    (task.folder / _TASK).write_text(json.dumps(plain))
    return ["-m", "allstep", "verify_worker", str(os.getpid()), str(task.folder)]


def log_path(folder: Path, rank: int) -> Path:
    """Where a worker's output goes."""
    return folder / f"rank-{rank}.log"


def run(arguments: list[str]) -> NoReturn:
    """Runs the script in this process and leaves it without further ado."""
    launcher_pid, folder = int(arguments[0]), Path(arguments[1])
    if os.getppid() != launcher_pid:  # it was killed while this process came up
        os._exit(1)
    plain = json.loads((folder / _TASK).read_text())
    task = Task(**{**plain, "script": Path(plain["script"]), "folder": folder})
    launch = read_launch()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # also while a collective waits
    _redirect_output(log_path(folder, launch.rank))
    if read_num_threads() is None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.local_size))
    went_well = record_script(task, launch.rank, launch.size)
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if went_well else 1)


def _redirect_output(path: Path) -> None:
    with path.open("wb") as log, open(os.devnull, "rb") as nothing:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.dup2(nothing.fileno(), 0)
