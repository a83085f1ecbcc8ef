"""A launcher's simulated store, and what a membership asks of the system."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from allstep.comm.generations import POLL_S
from allstep.comm.missing import RankNames
from allstep.comm.places import Place
from allstep.comm.system import CONNECT_S, Event, System
from allstep.comm.wire import Wire
from allstep.errors import CollectiveTimeoutError
from tests.helpers.simulation.network import FaultyNetwork, FaultyWire
from tests.helpers.simulation.scheduler import Process, Scheduler

_STORE_TIMEOUT_S = 20.0
_LOOK_S = 0.05
_LONGEST_POLL_S = 0.5


class SimulatedStore(Store):
    """What a launcher serves.

    Args:
        network: the way to it.
        launcher: who serves it.

    Attributes:
        rewritten: lists of a generation that were written twice, which must be none.
    """

    def __init__(self, network: FaultyNetwork, launcher: Process) -> None:
        super().__init__()
        self._network, self._launcher = network, launcher
        self.values: dict[str, bytes] = {}
        self.rewritten: list[str] = []

    def _reach(self) -> None:
        scheduler = self._network.scheduler
        scheduler.pause()
        host = scheduler.process.host
        if not self._network.reaches(host, self._launcher.host):
            scheduler.pause(
                lambda: self._network.reaches(host, self._launcher.host), _STORE_TIMEOUT_S
            )
        if self._launcher.has_ended:
            raise RuntimeError("Connection reset by peer")
        if not self._network.reaches(host, self._launcher.host):
            raise RuntimeError("wait timeout")

    def _change(self, key: str, value: bytes) -> None:
        if self.values.get(key) != value:
            if key in self.values and key.endswith("/members"):
                self.rewritten.append(key)
            self.values[key] = value
            self._network.scheduler.num_changes += 1

    def set(self, key: str, value: bytes | str) -> None:
        self._reach()
        self._change(key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        self._reach()
        self._network.scheduler.pause(lambda: key in self.values, _STORE_TIMEOUT_S)
        if key not in self.values:
            raise RuntimeError("wait timeout")
        return self.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._reach()
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._reach()
        total = int(self.values.get(key, b"0")) + amount
        self._change(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        self._reach()
        if self.values.get(key, b"") == _as_bytes(expected):
            self._change(key, _as_bytes(desired))
        return self.values.get(key, b"")

    def append(self, key: str, value: bytes | str) -> None:
        self._reach()
        self._change(key, self.values.get(key, b"") + _as_bytes(value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class _SimulatedEvent:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_set = scheduler, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        return self._scheduler.pause(self.is_set, timeout)


class SimulatedSystem(System):
    """What a membership of a simulated process asks of the system; see `System`.

    Args:
        network: with all connections.
        store: the launcher's.
        process: whose system this is.
        processes: all that there are, by number.
    """

    def __init__(
        self,
        network: FaultyNetwork,
        store: SimulatedStore,
        process: Process,
        processes: Sequence[Process],
    ) -> None:
        super().__init__("simulated")
        self._network, self._scheduler, self._store = network, network.scheduler, store
        self._process, self._processes = process, processes

    def now_s(self) -> float:
        return self._scheduler.now_s

    def sleep(self, duration_s: float) -> None:
        if duration_s > POLL_S:
            self._scheduler.sleep(duration_s)
        else:  # whoever finds the store as it was will look again
            self._scheduler.sleep_until_change(_LONGEST_POLL_S)

    def new_event(self) -> Event:
        return _SimulatedEvent(self._scheduler)

    def start_thread(self, run: Callable[[], None], name: str) -> None:
        self._scheduler.start(self._process, run, name)

    def own_place(self) -> Place:
        return Place(f"host{self._process.host}", self._process.number)

    def has_ended(self, place: Place) -> bool:
        process = self._processes[place.pid]
        return process.host == self._process.host and process.has_ended

    def launcher_has_ended(self) -> bool:
        return False  # that of a script is gone with all its workers

    def open_store(self, host: str, port: int, patience_s: float) -> Store:
        return self._store

    def connect(
        self,
        store: Store,
        names: RankNames,
        timeout_s: float,
        check: Callable[[], None],
    ) -> Wire:
        if names.number == 0:
            store.set("group", f"group {next(self._network.group_ids)}")
        store.set(f"process {names.number}", str(self._process.number))
        keys = ["group", *(f"process {rank}" for rank in range(names.size))]
        deadline_s = self.now_s() + CONNECT_S
        while not store.check(keys):
            check()
            if self.now_s() > deadline_s:
                raise CollectiveTimeoutError("Not all workers have met in time.")
            self.sleep(_LOOK_S)
        processes = [self._processes[int(store.get(key))] for key in keys[1:]]
        own = self._process.host
        while not all(self._network.connects(own, other.host) for other in processes):
            check()
            if self.now_s() > deadline_s:
                raise CollectiveTimeoutError("Not all workers have connected in time.")
            self.sleep(_LOOK_S)
        name = store.get("group").decode()
        return FaultyWire(self._network, name, names, names.number, processes, timeout_s)


def _as_bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
