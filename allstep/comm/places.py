"""Where workers run: named in errors, and whether one has ended is looked up."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Attributes:
        host: the machine's name.
        pid: the worker's process.
        space: equal where processes see each other by their ids; empty if nobody knows.
    """

    host: str
    pid: int
    space: str = ""

    @classmethod
    def own(cls) -> "Place":
        """This process's."""
        return cls(socket.gethostname(), os.getpid(), own_space())

    def __str__(self) -> str:
        """For messages.

        >>> str(Place("gpu01", 7))
        'process 7 on gpu01'
        """
        return f"process {self.pid} on {self.host}"

    def has_ended(self) -> bool:
        """Whether it is known that the process has ended; only its neighbours know."""
        if not self.space or self.space != own_space():
            return False
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("Z", "X")


def own_space() -> str:
    """Equal in processes that see each other's by their ids: of one system, in one container."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    if not boot.exists() or not os.path.lexists(space):
        return ""
    return f"{boot.read_text().strip()} {os.readlink(space)}"
