"""Where workers come from: this command's own launcher, another launcher, or this process."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch

from allstep.comm import Communicator
from allstep.env import read_launch, read_num_threads
from allstep.errors import UsageError
from allstep.train.devices import num_cores
from allstep.train.failures import run_worker

__all__ = ["num_workers_to_start", "run_here", "speaking_once", "start_workers"]

Action = Literal["train", "resume", "evaluate"]


def num_workers_to_start(requested: int | None) -> int | None:
    """How many workers this process has to provide; None if a launcher has started them.

    Raises:
        UsageError: if `requested` is out of range or contradicts the launcher.
    """
    launch = read_launch()
    if launch.launcher != "none":
        if requested not in (None, launch.size):
            raise UsageError(
                f"`workers` (={requested}) contradicts {launch.launcher}, which started"
                f" {launch.size}: leave `--workers` out."
            )
        return None
    num_gpus = torch.cuda.device_count()
    if requested is None:
        return max(1, num_gpus)
    if requested < 1:
        raise UsageError(f"`workers` (={requested}) must be at least 1.")
    if num_gpus and requested > num_gpus:
        raise UsageError(f"`workers` (={requested}) exceeds this machine's GPUs ({num_gpus}).")
    if not num_gpus and requested > num_cores():
        print(
            f"warning: `workers` (={requested}) exceeds this machine's cores ({num_cores()}): they"
            f" take turns, and are no faster than {num_cores()}.",
            file=sys.stderr,
        )
    return requested


def start_workers(num_workers: int, action: Action, run_dir: Path) -> int:
    """Starts workers on this machine for a run whose folder exists; returns the exit code."""
    from allstep.cli.launch import launch_workers

    command = ["-m", "allstep", "worker", action, str(run_dir), str(os.getpid())]
    return launch_workers(num_workers, command)


def run_here(body: Callable[[Communicator], int], launcher_pid: int | None = None) -> int:
    """Runs `body`, which returns an exit code, as a worker in this process."""

    def with_threads(comm: Communicator) -> int:
        _share_cores(comm.local_size)
        return body(comm)

    return run_worker(with_threads, launcher_pid=launcher_pid)


@contextlib.contextmanager
def speaking_once() -> Iterator[None]:
    """Drops what is printed inside on all ranks but 0, which all would print alike."""
    with contextlib.ExitStack() as stack:
        if read_launch().rank > 0:
            nowhere = io.StringIO()
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def _share_cores(num_local_workers: int) -> None:
    """Gives each worker of a host its share of the cores, unless the user said otherwise."""
    if read_num_threads() is None:
        torch.set_num_threads(max(1, num_cores() // num_local_workers))
