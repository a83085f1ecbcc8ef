"""Programs that check files for clusters, in an environment of their own beside this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("CLUSTER_TOOLS", ROOT / ".venv" / "cluster_tools"))


def run_tool(module: str, *arguments: object, home: Path) -> str:
    """What one of the programs prints; skips where it is not installed.

    Args:
        module: that it must be able to import.
        arguments: a file of `bin` and its arguments, or of Python's with "python" before.
        home: for what it keeps.
    """
    program, *rest = map(str, arguments)
    python = FOLDER / "bin" / "python"
    if (
        not python.exists()
        or subprocess.run(
            [
                python,
                "-c",
                f"import importlib.util as u, sys; sys.exit(not u.find_spec({module!r}))",
            ]
        ).returncode
    ):
        pytest.skip(f"{module} is not installed; `make test-slow` does it where it can be had")
    path = f"{home / 'bin'}:{FOLDER / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [FOLDER / "bin" / program, *rest],
        cwd=home,
        env=os.environ | {"HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def write_programs(folder: Path) -> Path:
    """Programs that the files call: this Python's torchrun and allstep, and a pip with no work."""
    folder.mkdir()
    modules = {"torchrun": "torch.distributed.run", "allstep": "allstep"}
    for name, module in modules.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
    (folder / "pip").write_text("#!/bin/sh\n")
    for program in folder.iterdir():
        program.chmod(0o755)
    return folder
