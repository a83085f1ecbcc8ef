"""What the kernel says about a process."""

import os
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """A process's state as a letter, its parent's pid, and its start in clock ticks since boot.

    The start tells a process from a later one with the same pid.
    """

    state: str
    parent: int
    start: str

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, even if its exit code has not been read yet."""
        return self.state in ("Z", "X")


def read_stat(pid: int) -> ProcessStat:
    """Reads the present state of a process from the kernel.

    Raises:
        OSError: if there is no such process, or if it is another user's.

    >>> read_stat(os.getpid()).parent == os.getppid()
    True
    """
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessStat(words[0], int(words[1]), words[19])


def is_alive(pid: int) -> bool:
    """Whether this machine has a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
