"""What the kernel says of a process."""

from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """The state as a letter, the parent's number, and when it was started, in the kernel's count.

    The start tells a process from a later one with its number.
    """

    state: str
    parent: int
    start: str

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left of it but its exit code."""
        return self.state in ("Z", "X")


def read_stat(pid: int) -> ProcessStat:
    """What the kernel says now.

    Raises:
        OSError: if there is no such process, or if it is someone else's.

    >>> import os
    >>> read_stat(os.getpid()).parent == os.getppid()
    True
    """
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessStat(words[0], int(words[1]), words[19])
