"""What a writer of checkpoints asks of its machine and its disk.

Tests hand in another: one that is full, or that loses what was not synced.
"""

import contextlib
import os
import shutil
import socket
import time
from pathlib import Path

import safetensors.torch
from torch import Tensor

from allstep.train.devices import is_alive


class Disk:
    """All changes of files and folders, and who makes them: this machine's."""

    @property
    def host(self) -> str:
        """This machine, without a "-"."""
        return socket.gethostname().replace("-", "_")

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def now_s(self) -> float:
        """Seconds that pass, from any start, whatever becomes of the date."""
        return time.monotonic()

    def is_alive(self, pid: int) -> bool:
        """Whether there is such a process on this machine."""
        return is_alive(pid)

    def make_folder(self, path: Path) -> None:
        """Makes one whose parent is there."""
        path.mkdir()

    def write(self, path: Path, data: bytes) -> None:
        """Writes a file."""
        path.write_bytes(data)

    def write_tensors(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Writes a file of safetensors' format."""
        safetensors.torch.save_file(tensors, path)

    def sync(self, path: Path) -> None:
        """Waits until a file's contents, or the names in a folder, outlive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        """Gives a folder another name in its parent."""
        os.rename(path, target)

    def remove(self, path: Path) -> None:
        """Deletes a folder, or what else has its name, as far as that can be."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


LOCAL_DISK = Disk()
