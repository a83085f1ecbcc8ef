"""`allstep profile_worker`: what `advise SCRIPT` starts, once; not for people.

It imports nothing that takes `attach` from its room before `profile_script` has put another in.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from allstep.cli.script_worker import run_in_folder
from allstep.doctor import profile_script
from allstep.env import forget_launch

__all__ = ["result_path", "run", "worker_command"]


def worker_command(
    script: Path, arguments: Sequence[str], folder: Path, timeout_s: float
) -> list[str]:
    """What makes Python the worker that profiles a script and leaves the result in a folder."""
    own = (str(os.getpid()), str(folder), str(timeout_s), str(script))
    return ["-m", "allstep", "profile_worker", *own, *arguments]


def result_path(folder: Path) -> Path:
    """Where the result goes."""
    return folder / "profile.json"


def run(arguments: list[str]) -> NoReturn:
    """Profiles the script in this process and leaves it."""
    launcher_pid, folder, timeout_s, script, *own = arguments

    def profile() -> None:
        forget_launch()  # its own launcher's and any beyond: the script is alone
        profile_script(Path(script), own, result_path(Path(folder)), float(timeout_s))

    run_in_folder(int(launcher_pid), Path(folder), lambda _: _exit_code(profile))


def _exit_code(body: Callable[[], None]) -> int:
    """What Python would exit with, and what it would print."""
    try:
        body()
    except SystemExit as stop:
        if isinstance(stop.code, int):
            return stop.code
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
