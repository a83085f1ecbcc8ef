"""What every process does that runs a user's script in place of its user."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from allstep.env import Launch, read_launch, read_num_threads

__all__ = ["last_lines", "log_path", "run_in_folder"]


def log_path(folder: Path, rank: int) -> Path:
    """Where a worker's output goes."""
    return folder / f"rank-{rank}.log"


def last_lines(folder: Path, rank: int, num_lines: int) -> list[str]:
    """What a worker printed last."""
    path = log_path(folder, rank)
    lines = path.read_text(errors="replace").rstrip().splitlines() if path.exists() else []
    return lines[-num_lines:]


def run_in_folder(launcher_pid: int, folder: Path, body: Callable[[Launch], int]) -> NoReturn:
    """Runs `body`, which returns an exit code, and leaves this process without further ado.

    What the script prints goes to the worker's log, and it has no input.

    Args:
        launcher_pid: this process's parent, while it lives.
        folder: for the log.
        body: gets this worker's launch.
    """
    if os.getppid() != launcher_pid:  # it was killed while this process came up
        os._exit(1)
    launch = read_launch()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # also while a collective waits
    _redirect_output(log_path(folder, launch.rank))
    if read_num_threads() is None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.local_size))
    code = body(launch)
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect_output(path: Path) -> None:
    with path.open("wb") as log, open(os.devnull, "rb") as nothing:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.dup2(nothing.fileno(), 0)
