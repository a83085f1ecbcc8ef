"""Where workers run; errors name it, and it tells whether a worker has ended."""

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
        host: name of the machine.
        pid: pid of the worker's process.
        space: equal for processes that see each other's pids; empty if unknown.
        accelerator: id of the accelerator that it computes on; empty if unknown.
        born: when the process was started, in clock ticks since boot; empty if unknown.
    """

    host: str
    pid: int
    space: str = ""
    accelerator: str = ""
    born: str = ""

    @classmethod
    def own(cls, device: torch.device | None = None) -> "Place":
        """The place of this process.

        Args:
            device: the device that it computes on, if that is known.
        """
        place = cls.of_process(os.getpid())
        return place if device is None else replace(place, accelerator=device_id(device))

    @classmethod
    def of_process(cls, pid: int) -> "Place":
        """The place of a process on this host."""
        born = ""
        with contextlib.suppress(OSError):  # where the system does not say
            born = read_stat(pid).start
        return cls(socket.gethostname(), pid, own_space(), born=born)

    def __str__(self) -> str:
        """The place as messages name it.

        >>> str(Place("gpu01", 7))
        'process 7 on gpu01'
        """
        return f"process {self.pid} on {self.host}"

    def has_ended(self) -> bool:
        """Whether the process is known to have ended; known only to processes in its `space`."""
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
    """Checks that no two workers share an accelerator, which its backend does not support.

    Raises:
        UsageError: if two workers do; names them and says what to do.
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
    """An id that is equal for processes that see each other's pids: one boot, one container."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    if not boot.exists() or not os.path.lexists(space):
        return ""
    return f"{boot.read_text().strip()} {os.readlink(space)}"
