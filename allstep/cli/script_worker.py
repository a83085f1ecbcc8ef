"""Workers that run a user's script for `verify` and `advise`.

Nothing that is imported here takes `attach` from its room (`train` does) before another has been
put in its place.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from allstep.cli.interruptible import SIGNALS
from allstep.cli.worker import read_call, share_cores
from allstep.doctor import RecordRequest, profile_script, record_script
from allstep.env import Launch, forget_launch, read_launch
from allstep.files import from_plain

# Imported once, where the workers of all runs are forked from; else each takes seconds to begin. An
# optimizer's first use imports the last.
PRELOAD = (__name__, "torch._dynamo")

# As `allstep worker` names them.
PROFILE, VERIFY = (f"{__name__}:{name}" for name in ("profile", "verify"))


def verify(folder: Path) -> NoReturn:
    """Writes a record of the script's first steps to the folder."""
    asked = read_call(folder).arguments
    task = from_plain(RecordRequest, asked | {"folder": folder})
    _run(lambda launch: 0 if record_script(task, launch.rank, launch.size) else 1)


def profile_path(folder: Path) -> Path:
    """The file to which `profile` writes."""
    return folder / "profile.json"


def profile(folder: Path) -> NoReturn:
    """Writes a profile of the script's step to the folder, or why there is none."""
    asked = read_call(folder).arguments

    def body(launch: Launch) -> int:
        forget_launch()  # this one and any beyond: the script is run as a single worker
        script, result = Path(asked["script"]), profile_path(folder)
        profile_script(script, asked["arguments"], result, asked["timeout_s"])
        return 0

    _run(body)


def _run(body: Callable[[Launch], int]) -> NoReturn:
    """Runs `body`, which returns an exit code, and exits at once with it.

    `body` reports what ends the script; an exception of its own is a mistake of ours.
    """
    launch = read_launch()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # also while a collective waits
    share_cores(launch.local_size)
    code = 1
    try:
        code = body(launch)
    except BaseException:
        traceback.print_exc()
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
