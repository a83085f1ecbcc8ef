"""The operations of the machine and its disk that writing checkpoints needs.

Tests pass another: a disk that is full, or one that loses what was not synced.
"""

import contextlib
import os
import shutil
import socket
import time
from pathlib import Path

import safetensors.torch
from torch import Tensor

from allstep.env import is_alive


class Disk:
    """All changes of files and folders, and the identity of the process that makes them."""

    @property
    def host(self) -> str:
        """This machine's name, without a "-"."""
        return socket.gethostname().replace("-", "_")

    @property
    def pid(self) -> int:
        """This process's id."""
        return os.getpid()

    def now_s(self) -> float:
        """A monotonic time in seconds, which changes of the date don't affect."""
        return time.monotonic()

    def is_alive(self, pid: int) -> bool:
        """Whether this machine has a process with this id."""
        return is_alive(pid)

    def make_folder(self, path: Path) -> None:
        """Makes a folder whose parent exists."""
        path.mkdir()

    def write(self, path: Path, data: bytes) -> None:
        """Writes a file."""
        path.write_bytes(data)

    def write_tensors(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Writes a file in safetensors' format."""
        safetensors.torch.save_file(tensors, path)

    def sync(self, path: Path) -> None:
        """Waits until a file's contents, or the names in a folder, outlive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        """Renames a folder within its parent."""
        os.rename(path, target)

    def remove(self, path: Path) -> None:
        """Deletes a folder, or whatever has its name, as far as possible."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


LOCAL_DISK = Disk()
