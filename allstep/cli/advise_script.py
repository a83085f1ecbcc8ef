"""What a script's step costs on this machine, for `allstep advise SCRIPT`."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from allstep.cli.launch import launch_workers
from allstep.cli.profile_worker import result_path, worker_command
from allstep.cli.script_worker import last_lines
from allstep.doctor import NUM_UPDATES, ScriptProfile, read_profile
from allstep.errors import UsageError

__all__ = ["profile"]


def profile(script: Path, arguments: Sequence[str], timeout_s: float) -> ScriptProfile:
    """Runs a script for its first steps, as a lone worker in a process of its own.

    Args:
        script: a file.
        arguments: the script's own.
        timeout_s: longest time without a forward or a step.

    Raises:
        UsageError: if it fails, is stuck, or nothing can be said about it.
        SystemExit: if a signal has ended it.
    """
    waiting = Console(stderr=True).status(f"{script} on 1 worker, {NUM_UPDATES} steps")
    with tempfile.TemporaryDirectory(prefix="allstep-advise-") as name, waiting:
        folder = Path(name)
        code = launch_workers(1, worker_command(script, arguments, folder, timeout_s))
        if code > 128:
            sys.exit(code)
        if not result_path(folder).exists():
            raise UsageError(
                f"`script` (={script}) failed with exit code {code}:"
                f" {' '.join(last_lines(folder, 0, 1))} Run `python {script}` to see where."
            )
        return read_profile(result_path(folder), script)
