"""Folders in memory, where there is one for files: nothing of a simulation needs a disk."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = "/dev/shm"
PREFIX = "simulation-"  # of the folders there


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder, which is deleted afterwards."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, prefix=PREFIX) as folder:
        yield Path(folder)
