"""Settings of tools and folders in the user's environment."""

import shlex
from pathlib import Path

from allstep.env.variables import Variables


def read_compiler() -> list[str]:
    """The command that compiles C: the variable CC, or else cc.

    Raises:
        ValueError: if the quotes in CC don't match.
    """
    return shlex.split(Variables().text("CC") or "cc")


def read_cache_folder() -> Path:
    """The folder for files that can be made again: in XDG_CACHE_HOME, or else in ~/.cache.

    Raises:
        RuntimeError: if there is no home folder.
    """
    return Path(Variables().text("XDG_CACHE_HOME") or Path.home() / ".cache") / "allstep"
