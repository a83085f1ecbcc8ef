"""What the user's environment says of tools and folders."""

import shlex
from pathlib import Path

from allstep.env.variables import Variables


def read_compiler() -> list[str]:
    """The command that compiles C: of the variable CC, else cc.

    Raises:
        ValueError: if its quotes don't match.
    """
    return shlex.split(Variables().text("CC") or "cc")


def read_cache_folder() -> Path:
    """Where what can be made again is kept: in that of XDG_CACHE_HOME, else in ~/.cache.

    Raises:
        RuntimeError: if there is no home.
    """
    return Path(Variables().text("XDG_CACHE_HOME") or Path.home() / ".cache") / "allstep"
