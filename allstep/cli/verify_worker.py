"""`allstep verify_worker`: what `verify` starts, once for each worker; not for people.

It imports nothing that takes `attach` from its room before `record_script` has put another in.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from allstep.cli.script_worker import run_in_folder
from allstep.doctor import RecordRequest, record_script

__all__ = ["run", "write_task"]

_TASK = "task.json"


def write_task(task: RecordRequest) -> list[str]:
    """Leaves a task in its folder; returns what makes Python a worker that does it."""
    plain = {**asdict(task), "script": str(task.script), "folder": str(task.folder)}
    (task.folder / _TASK).write_text(json.dumps(plain))
    return ["-m", "allstep", "verify_worker", str(os.getpid()), str(task.folder)]


def run(arguments: list[str]) -> NoReturn:
    """Runs the script in this process and leaves it."""
    launcher_pid, folder = int(arguments[0]), Path(arguments[1])
    plain = json.loads((folder / _TASK).read_text())
    task = RecordRequest(**{**plain, "script": Path(plain["script"]), "folder": folder})
    run_in_folder(
        launcher_pid,
        folder,
        lambda launch: 0 if record_script(task, launch.rank, launch.size) else 1,
    )
