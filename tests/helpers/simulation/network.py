"""Simulated connections, a launcher's store, and what a membership asks of the system."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from allstep.comm import Work
from allstep.comm.generations import POLL_S
from allstep.comm.missing import RankNames
from allstep.comm.places import Place
from allstep.comm.wire import Wire
from allstep.comm.work import CompletedWork, JoinedWork
from allstep.errors import CollectiveTimeoutError, PeerLostError
from tests.helpers.simulated import Network, SimulatedWire
from tests.helpers.simulation.scheduler import Process, Scheduler

_MOST_DELAY_S = 0.01
_STORE_TIMEOUT_S = 20.0
_LOOK_S = 0.05
_LONGEST_POLL_S = 0.5


class FaultyNetwork(Network):
    """Messages that arrive late, in another order between tags, or never.

    Args:
        scheduler: whose clock they take.

    Attributes:
        parted: hosts that are cut off from the others.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.parted: frozenset[int] = frozenset()
        self.channels: dict[Any, deque[tuple[float, Tensor]]] = defaultdict(deque)
        self.closed: set[tuple[str, int]] = set()  # group and rank

    def reaches(self, host: int, other: int) -> bool:
        """Whether there is a way between two hosts."""
        return (host in self.parted) == (other in self.parted)

    def put(self, channel: tuple[str, int, int, int], buffer: Tensor) -> None:
        """A message on its way, behind the earlier ones of its channel."""
        scheduler, queue = self.scheduler, self.channels[channel]
        arrival_s = scheduler.now_s + scheduler.random.random() * _MOST_DELAY_S
        if queue:
            arrival_s = max(arrival_s, queue[-1][0])
        queue.append((arrival_s, buffer.clone()))
        scheduler.arrivals_s.append(arrival_s)

    def close(self, group: str, rank: int, *, loses: bool) -> None:
        """A rank's connections are closed.

        Args:
            group, rank: whose.
            loses: whether what is on its way from there may be lost.
        """
        if (group, rank) in self.closed:
            return
        self.closed.add((group, rank))
        if not loses:
            return
        for (own_group, source, *_), queue in self.channels.items():
            if (own_group, source) == (group, rank) and self.scheduler.random.random() < 0.5:
                while queue and queue[-1][0] > self.scheduler.now_s:
                    queue.pop()


class FaultyWire(SimulatedWire):
    """A rank's end of connections that may break.

    Args:
        network: with the messages.
        name: of the group.
        names: of its ranks.
        rank: this one.
        processes: of the group, by rank.
        timeout_s: how long a call may take.
    """

    def __init__(
        self,
        network: FaultyNetwork,
        name: str,
        names: RankNames,
        rank: int,
        processes: Sequence[Process],
        timeout_s: float,
    ) -> None:
        super().__init__(network, name, names, rank, len(processes))
        self._faulty, self._processes = network, tuple(processes)
        self.timeout_s = timeout_s
        processes[rank].on_end.append(self.interrupt)

    def send(self, buffer: Tensor, dest: int, tag: int, verb: str) -> Work[None]:
        network, own, other = self._faulty, self._processes[self.rank], self._processes[dest]
        network.scheduler.pause()
        self._check_open(verb)
        if network.reaches(own.host, other.host):
            # What is sent to one that has ended may be noticed at once, or later.
            if (self._name, dest) in network.closed and network.scheduler.random.random() < 0.5:
                self.interrupt()
                raise PeerLostError(f"`{verb}`: rank {dest} has closed its connection.")
            network.put((self._name, self.rank, dest, tag), buffer)
        return CompletedWork(None)

    def recv(self, buffer: Tensor, source: int, tag: int, verb: str) -> Work[None]:
        network, own, other = self._faulty, self._processes[self.rank], self._processes[source]
        queue = network.channels[self._name, source, self.rank, tag]

        def has_come() -> bool:
            if (self._name, self.rank) in network.closed:
                return True
            if queue:
                return queue[0][0] <= network.scheduler.now_s
            reaches = network.reaches(own.host, other.host)
            return reaches and (self._name, source) in network.closed

        def take() -> None:
            came = network.scheduler.pause(has_come, self.timeout_s)
            self._check_open(verb)
            if not came:
                self.interrupt()
                raise CollectiveTimeoutError(f"`{verb}`: nothing came from rank {source}.")
            if not queue:
                self.interrupt()
                raise PeerLostError(f"`{verb}`: rank {source} has closed its connection.")
            buffer.copy_(queue.popleft()[1])

        return JoinedWork([], take)

    def _check_open(self, verb: str) -> None:
        if (self._name, self.rank) in self._faulty.closed:
            raise PeerLostError(f"`{verb}`: the connections are closed.")

    def new_group_id(self) -> int:
        self._faulty.scheduler.pause()
        return super().new_group_id()

    def split(self, name: str, ranks: Sequence[int], device: torch.device) -> "FaultyWire":
        rank = ranks.index(self.rank)
        return FaultyWire(
            self._faulty,
            f"{self._name}/{name}",
            self.names.part(ranks, rank),
            rank,
            [self._processes[other] for other in ranks],
            self.timeout_s,
        )

    def interrupt(self) -> None:
        self._faulty.close(self._name, self.rank, loses=True)

    def close(self, *, abort: bool) -> None:
        self._faulty.close(self._name, self.rank, loses=abort)


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


class SimulatedSystem:
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
        self._network, self._scheduler, self._store = network, network.scheduler, store
        self._process, self._processes = process, processes

    def now_s(self) -> float:
        return self._scheduler.now_s

    def sleep(self, duration_s: float) -> None:
        if duration_s > POLL_S:
            self._scheduler.sleep(duration_s)
        else:  # whoever finds the store as it was will look again
            self._scheduler.sleep_until_change(_LONGEST_POLL_S)

    def start_thread(
        self, run: Callable[[], None], name: str, *, awaited_at_exit: bool = False
    ) -> None:
        self._scheduler.start(self._process, run, name)

    def own_place(self) -> Place:
        return Place(f"host{self._process.host}", self._process.number)

    def has_ended(self, place: Place) -> bool:
        process = self._processes[place.pid]
        return process.host == self._process.host and process.has_ended

    def open_store(self, host: str, port: int, timeout_s: float) -> Store:
        return self._store

    def connect(
        self,
        store: Store,
        names: RankNames,
        device: torch.device,
        meeting_s: float,
        timeout_s: float,
        check: Callable[[], None],
    ) -> Wire:
        if names.number == 0:
            store.set("group", f"group {next(self._network.group_ids)}")
        store.set(f"process {names.number}", str(self._process.number))
        keys = ["group", *(f"process {rank}" for rank in range(names.size))]
        deadline_s = self.now_s() + meeting_s
        while not store.check(keys):
            check()
            if self.now_s() > deadline_s:
                raise CollectiveTimeoutError("Not all workers have met in time.")
            self.sleep(_LOOK_S)
        processes = [self._processes[int(store.get(key))] for key in keys[1:]]
        name = store.get("group").decode()
        return FaultyWire(self._network, name, names, names.number, processes, timeout_s)


def _as_bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
