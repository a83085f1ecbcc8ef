"""`allstep launch --elastic`: a user's script on elastic workers.

[Note: a script's workers] Each is `allstep worker`, which becomes the script by `exec`: the same
process, with what torchrun would tell it. `RUN/script.json` says what `allstep join` is to start.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from allstep.cli.exits import read_store
from allstep.cli.launch import Workers, launch_workers
from allstep.cli.output_files import writing_errors
from allstep.cli.run_folder import is_run
from allstep.cli.store import read_address
from allstep.cli.worker import read_call
from allstep.cli.workers import check_min_workers, num_workers_to_start
from allstep.env import environment_of_script
from allstep.errors import UsageError
from allstep.files import read_json, write_json
from allstep.train import launcher_lock

_FILE = "script.json"


def run(arguments: Sequence[str], command: Sequence[str]) -> int:
    """Runs a script on each of the workers, until all have ended.

    Args:
        arguments: the flags before `--`.
        command: the script and its own arguments.
    """
    parser = argparse.ArgumentParser(prog="allstep launch", allow_abbrev=False)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--workers", metavar="N", type=int, required=True)
    parser.add_argument("--min-workers", metavar="N", type=int, default=1)
    parser.add_argument("--run-dir", metavar="DIR", type=Path)
    parser.add_argument("--store", metavar="HOST:PORT")
    known = parser.parse_args(arguments)
    check_min_workers(known.min_workers, known.workers)
    script_file = command[0]
    if not (script_file.startswith("-") or Path(script_file).is_file()):  # `-m` takes a module
        raise UsageError(f"`script` (={script_file!r}) is no file in {Path.cwd()}.")
    num_workers = num_workers_to_start(known.workers)
    if num_workers is None:
        raise UsageError("`elastic` needs `allstep launch` itself as launcher: start it by hand.")
    run_dir: Path | None = known.run_dir
    store = None if known.store is None else read_address(known.store)
    script: dict[str, Any] = {"command": list(command), "folder": os.getcwd()}
    with contextlib.ExitStack() as stack:
        if run_dir is not None:
            if is_run(run_dir):
                raise UsageError(f"`run_dir` (={run_dir}) holds a recipe's run; choose another.")
            stack.enter_context(launcher_lock(run_dir))
            with writing_errors(f"`run_dir` (={run_dir})"):
                write_json(run_dir / _FILE, script)
            script["run_dir"] = str(run_dir.absolute())
        return _launch(num_workers, script, run_dir, min_workers=known.min_workers, store=store)


def is_of_script(run_dir: Path) -> bool:
    """Whether a folder belongs to a script's workers."""
    return (run_dir / _FILE).exists()


def join(run_dir: Path, num_workers: int) -> int:
    """Adds workers to a script's run; returns the exit code when they have ended."""
    store = read_store(run_dir)
    script = read_json(run_dir / _FILE) | {"run_dir": str(run_dir.absolute())}
    joins = store.reachable_address()
    return _launch(num_workers, script, min_workers=store.min_workers, joins=joins)


def _launch(
    num_workers: int, script: dict[str, Any], run_dir: Path | None = None, **options: Any
) -> int:
    """Args: options: of `Workers`."""
    with tempfile.TemporaryDirectory(prefix="allstep-") as name:
        function = f"{__name__}:run_script"
        workers = Workers(num_workers, function, Path(name), script, **options)
        return launch_workers(workers, run_dir)


def run_script(folder: Path) -> NoReturn:
    """Runs the script as one of the workers."""
    script = read_call(folder).arguments
    os.chdir(script["folder"])
    environ = environment_of_script(script.get("run_dir"))
    os.execve(sys.executable, [sys.executable, *script["command"]], environ)
