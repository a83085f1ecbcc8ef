"""What the user's environment says of tools and folders."""

import os
import shlex
from pathlib import Path


def read_compiler() -> list[str]:
    """The command that compiles C: of the variable CC, else cc."""
    return shlex.split(os.environ.get("CC") or "cc")


def read_cache_folder() -> Path:
    """Where what can be made again is kept: in that of XDG_CACHE_HOME, else in ~/.cache.

    Raises:
        RuntimeError: if there is no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "allstep"
