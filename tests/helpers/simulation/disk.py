"""A disk that is full for a while, and whose calls are moments at which a process may be lost."""

import errno
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from torch import Tensor

from allstep.train.disk import Disk
from tests.helpers.simulation.scheduler import KilledError, Process, Scheduler
from tests.helpers.simulation.volume import Volume

_MOST_CALLS = 300  # of a training that nobody disturbs, about


@dataclass
class DiskFaults:
    """What happens to the disk, at which of all calls.

    Attributes:
        full: from which call on there is no space, and from which on there is again.
        power_fails_at: when hosts lose their power.
        dark_hosts: which; None for all, and the launcher's.
    """

    full: tuple[float, float] = (math.inf, math.inf)
    power_fails_at: float = math.inf
    dark_hosts: frozenset[int] | None = None

    @classmethod
    def draw(cls, scheduler: Scheduler, num_hosts: int) -> "DiskFaults":
        """Those of a seed."""
        random = scheduler.random
        faults = cls()
        if random.random() < 0.5:
            first = random.randrange(_MOST_CALLS)
            faults.full = first, first + random.choice((1, 1, 3, 30, math.inf))
        if random.random() < 0.6:
            faults.power_fails_at = random.randrange(_MOST_CALLS)
            if num_hosts > 1 and random.random() < 0.5:  # the launcher is on the first
                faults.dark_hosts = frozenset({random.randrange(1, num_hosts)})
        return faults

    @property
    def ends_all(self) -> bool:
        """Whether no worker need come to the end."""
        return self.power_fails_at < math.inf and self.dark_hosts is None


class FaultyDisk:
    """What happens at the calls of all processes.

    Args:
        volume: what is on it.
        scheduler: who goes on.
        faults: what happens.
        processes: all that there are.

    Attributes:
        num_refusals: calls for which there was no space.
    """

    def __init__(
        self,
        volume: Volume,
        scheduler: Scheduler,
        faults: DiskFaults,
        processes: Sequence[Process],
    ) -> None:
        self._volume, self._scheduler, self._processes = volume, scheduler, processes
        self._faults, self._num_calls = faults, 0
        self.num_refusals = 0

    def of(self, process: Process) -> "SimulatedDisk":
        """A process's way to it."""
        return SimulatedDisk(
            self._volume, process, self._call, self._is_alive, lambda: self._scheduler.now_s
        )

    def _call(self, takes_space: bool) -> None:
        """Others go on meanwhile."""
        self._scheduler.pause()
        if not self._scheduler.process.is_armed:
            return
        faults, self._num_calls = self._faults, self._num_calls + 1
        if self._num_calls == faults.power_fails_at:
            self._lose_power()
        first, last = faults.full
        if takes_space and first <= self._num_calls < last:
            self.num_refusals += 1
            raise no_space()

    def _lose_power(self) -> None:
        def is_dark(host: int) -> bool:
            dark = self._faults.dark_hosts
            return dark is None or host in dark

        for process in list(self._processes):
            if is_dark(process.host):
                self._scheduler.end(process, killed=True)
        self._volume.lose_power(is_dark, self._scheduler.random)
        if self._scheduler.process.has_ended:
            raise KilledError

    def _is_alive(self, pid: int) -> bool:
        return pid < len(self._processes) and not self._processes[pid].has_ended


class SimulatedDisk(Disk):
    """A process's way to a disk; see `Disk`.

    Args:
        volume: what is on it.
        process: whose this is.
        call: called before each change, with whether that takes space.
        is_alive: tells it of a process's number.
        now_s: the simulated time.
    """

    def __init__(
        self,
        volume: Volume,
        process: Process,
        call: Callable[[bool], None],
        is_alive: Callable[[int], bool],
        now_s: Callable[[], float],
    ) -> None:
        self._volume, self._process = volume, process
        self._call, self._is_alive, self._now_s = call, is_alive, now_s

    @property
    def host(self) -> str:
        return f"host{self._process.host}"

    @property
    def pid(self) -> int:
        return self._process.number

    def now_s(self) -> float:
        return self._now_s()

    def is_alive(self, pid: int) -> bool:
        return self._is_alive(pid)

    def make_folder(self, path: Path) -> None:
        self._call(True)
        self._volume.make_folder(path, self._process.host)

    def write(self, path: Path, data: bytes) -> None:
        for end in (0, len(data) // 2, len(data)):
            self._call(True)
            self._volume.write(path, data[:end], self._process.host)

    def write_tensors(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self.write(path, safetensors.torch.save(tensors))

    def sync(self, path: Path) -> None:
        self._call(True)
        path.stat()  # which must be there
        self._volume.sync(path)

    def rename(self, path: Path, target: Path) -> None:
        self._call(True)
        self._volume.rename(path, target, self._process.host)

    def remove(self, path: Path) -> None:
        with suppress(OSError):
            for entry in sorted(path.iterdir()) if path.is_dir() else ():
                self.remove(entry)
            if path.exists():
                self._call(False)
                self._volume.remove(path, self._process.host)


def no_space() -> OSError:
    """What a full disk raises."""
    return OSError(errno.ENOSPC, "No space left on device")
