"""A wall clock of a process's own, which can be set; the machine's stays as it is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allstep.env import read_error_file

_ROOT = Path(__file__).parents[3]  # from where tests are imported
_VARIABLE, _BYTES = "NEMESIS_CLOCK", 8  # as clock.c has them
_RUN = "import pathlib, sys; from tests.helpers.processes import run_call as run; sys.exit(run({}))"


def build_clock(folder: Path) -> Path:
    """The library that a process is started with; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs cc, to give processes clocks of their own")
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    options = ("-shared", "-fPIC", "-O1", "-Wall", "-Werror")
    subprocess.run([compiler, *options, "-o", library, source, "-ldl"], check=True)
    return library


def environment_with_clock(library: Path, file: Path) -> dict[str, str]:
    """For a process with a clock of its own, which `set_clock` sets.

    Args:
        library: of `build_clock`.
        file: says how it is set; made here.
    """
    file.write_bytes(bytes(_BYTES))
    return {**os.environ, "LD_PRELOAD": str(library), _VARIABLE: str(file)}


def set_clock(file: Path, ahead_s: int) -> None:
    """Sets the clock of the process with that file, if there is one.

    Args:
        file: of `environment_with_clock`.
        ahead_s: of the machine's clock.
    """
    if file.exists():
        with file.open("r+b") as stream:
            stream.write(ahead_s.to_bytes(_BYTES, sys.byteorder, signed=True))


def clock_file(folder: Path, pid: int) -> Path:
    """Of a worker, in the folder of all clocks."""
    return folder / f"clock-{pid}"


def has_own_clock() -> bool:
    """Whether this process has one."""
    return _VARIABLE in os.environ


def restart_with_clock(library: Path, folder: Path) -> None:
    """Runs this worker's call from its start in a Python of its own, with a clock of its own.

    Args:
        library: of `build_clock`.
        folder: of all clocks.
    """
    error_file = read_error_file()
    assert error_file is not None
    environ = environment_with_clock(library, clock_file(folder, os.getpid()))
    code = _RUN.format(f"pathlib.Path({str(error_file.parent.parent)!r})")
    os.chdir(_ROOT)  # to enter a host has changed it
    os.execve(sys.executable, [sys.executable, "-c", code], environ)
