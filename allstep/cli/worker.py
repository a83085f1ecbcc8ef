"""`allstep worker`: what `train` and its like start, once for each worker; not for people."""

import json
import os
from pathlib import Path

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Runs one worker of a run whose folder exists."""
    action, folder, pid, *request = arguments
    launcher_pid = int(pid)
    if os.getppid() != launcher_pid:  # it was interrupted before it knew its children
        return 1

    from allstep.cli import run_folder
    from allstep.cli.workers import run_here

    run_dir = Path(folder)
    if action == "evaluate":
        from allstep.cli.evaluate import evaluate_worker

        return run_here(lambda comm: evaluate_worker(comm, run_dir), launcher_pid)

    if action == "sharpness":
        from allstep.cli.sharpness import Request, sharpness_worker

        asked = Request(**json.loads(request[0]))
        return run_here(lambda comm: sharpness_worker(comm, run_dir, asked), launcher_pid)

    from allstep.cli.train import train_worker

    return run_here(
        lambda comm: train_worker(
            comm,
            lambda: (run_folder.read_recipe(run_dir, argument="run"), run_dir),
            resume=action == "resume",
        ),
        launcher_pid,
    )
