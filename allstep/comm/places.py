"""Where workers run: named in errors, and whether one has ended is looked up."""

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from allstep.device import HIDE_ACCELERATORS, device_id
from allstep.env import read_stat
from allstep.errors import UsageError


@dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Attributes:
        host: the machine's name.
        pid: the worker's process.
        space: equal where processes see each other by their ids; empty if nobody knows.
        accelerator: the accelerator that it computes on; empty if that is not known.
        born: when the process was started, in the system's own count; empty if that is not known.
    """

    host: str
    pid: int
    space: str = ""
    accelerator: str = ""
    born: str = ""

    @classmethod
    def own(cls, device: torch.device | None = None) -> "Place":
        """This process's.

        Args:
            device: where it computes, if that is known.
        """
        place = cls.of_process(os.getpid())
        return place if device is None else replace(place, accelerator=device_id(device))

    @classmethod
    def of_process(cls, pid: int) -> "Place":
        """A process's, of this host."""
        born = ""
        with contextlib.suppress(OSError):  # where the system does not tell
            born = read_stat(pid).start
        return cls(socket.gethostname(), pid, own_space(), born=born)

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
            stat = read_stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False
        return stat.has_ended or (self.born != "" and stat.start != self.born)


def check_own_devices(places: Sequence[Place]) -> None:
    """Checks that no two workers compute on one accelerator, which its backend can't do.

    Raises:
        UsageError: names two that do, and the cure.
    """
    first: dict[str, int] = {}
    for rank, place in enumerate(places):
        if place.accelerator and first.setdefault(place.accelerator, rank) != rank:
            raise UsageError(
                f"ranks {first[place.accelerator]} and {rank} both compute on accelerator"
                f" {place.accelerator} of {place.host}; start one worker for each accelerator, and"
                " have each process see its own (`--gpus-per-task=1`) or all of them; to compute on"
                f" the CPU, pass device='cpu', or {HIDE_ACCELERATORS}."
            )


def own_space() -> str:
    """Equal in processes that see each other's by their ids: of one system, in one container."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    if not boot.exists() or not os.path.lexists(space):
        return ""
    return f"{boot.read_text().strip()} {os.readlink(space)}"
