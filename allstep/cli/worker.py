"""`allstep worker MODULE:FUNCTION FOLDER`: a worker process of a launch; not for direct use.

[Note: worker protocol] The folder holds `call.json`, the function's arguments as plain data, and
takes `result.json`, what rank 0 returns, the reports of failures and, where they are wanted, logs.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from allstep.cli.imports import import_at_start
from allstep.cli.interruptible import SIGNALS
from allstep.env import num_cores, read_num_threads, set_environment
from allstep.files import read_json, write_json

_CALL, _RESULT = "call.json", "result.json"


@dataclass(frozen=True)
class Call:
    """The arguments of a worker's function, and the process on which it depends.

    Attributes:
        arguments: the function's arguments.
        launcher_pid: the process whose end ends the worker; None means its parent.
    """

    arguments: dict[str, Any]
    launcher_pid: int | None


def run(arguments: list[str]) -> int:
    """Runs one worker of a launch whose folder exists."""
    name, folder = arguments
    if os.getppid() != read_call(Path(folder)).launcher_pid:  # it was killed meanwhile
        return 1
    return find_function(name)(Path(folder)) or 0


def run_forked(name: str, folder: Path, environ: Mapping[str, str], log: Path | None) -> NoReturn:
    """Runs one worker in a process that was forked with its signals blocked."""
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if log is not None:
        _redirect_output(log)
    set_environment(environ)
    sys.exit(find_function(name)(folder) or 0)


def _redirect_output(log: Path) -> None:
    with log.open("wb") as stream, open(os.devnull, "rb") as nothing:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        os.dup2(nothing.fileno(), 0)


def find_function(name: str) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names.

    >>> find_function("os.path:basename")("a/b")
    'b'
    """
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_at_start(module), function)
    return found


def write_call(folder: Path, arguments: Mapping[str, Any], launcher_pid: int | None) -> None:
    """Writes a function's arguments for the workers."""
    write_json(folder / _CALL, {"arguments": arguments, "launcher_pid": launcher_pid})


def read_call(folder: Path) -> Call:
    """Reads the arguments from `write_call`."""
    return Call(**read_json(folder / _CALL))


def write_result(folder: Path, plain: Any) -> None:
    """Writes the function's result, atomically."""
    write_json(folder / _RESULT, plain)


def read_result(folder: Path) -> Any:
    """Rank 0's result; None if there is none."""
    path = folder / _RESULT
    return read_json(path) if path.exists() else None


def log_path(folder: Path, rank: int) -> Path:
    """The file for a worker's output, if it is kept."""
    return folder / f"rank-{rank}.log"


def share_cores(num_local_workers: int) -> None:
    """Gives each worker of a host its share of the cores, unless the user has set it."""
    if read_num_threads() is None:
        import torch

        torch.set_num_threads(max(1, num_cores() // num_local_workers))


def last_lines(folder: Path, rank: int, num_lines: int) -> list[str]:
    """The last lines of a worker's output."""
    path = log_path(folder, rank)
    lines = path.read_text(errors="replace").rstrip().splitlines() if path.exists() else []
    return lines[-num_lines:]
