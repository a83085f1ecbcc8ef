"""Simulated connections: messages come late, in another order, or never."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.comm import Work
from allstep.comm.missing import RankNames
from allstep.comm.work import CompletedWork, JoinedWork
from allstep.errors import CollectiveTimeoutError, PeerLostError
from tests.helpers.simulated import Network, SimulatedWire
from tests.helpers.simulation.scheduler import Process, Scheduler

_MOST_DELAY_S = 0.01


class FaultyNetwork(Network):
    """Messages that arrive late, in another order between tags, or never.

    Args:
        scheduler: whose clock they take.

    Attributes:
        parted: hosts that are cut off from the others.
        unconnected: hosts whose workers have the store alone, as behind a firewall.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.parted: frozenset[int] = frozenset()
        self.unconnected: frozenset[int] = frozenset()
        self.channels: dict[Any, deque[tuple[float, Tensor]]] = defaultdict(deque)
        self.closed: set[tuple[str, int]] = set()  # group and rank

    def reaches(self, host: int, other: int) -> bool:
        """Whether there is a way between two hosts."""
        return (host in self.parted) == (other in self.parted)

    def connects(self, host: int, other: int) -> bool:
        """Whether workers of two hosts have a way to each other."""
        return self.reaches(host, other) and (host == other or not {host, other} & self.unconnected)

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
        if network.connects(own.host, other.host):
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
            connects = network.connects(own.host, other.host)
            return connects and (self._name, source) in network.closed

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
            self.names.subgroup(ranks, rank),
            rank,
            [self._processes[other] for other in ranks],
            self.timeout_s,
        )

    def check(self, verb: str) -> None:
        pass

    def interrupt(self) -> None:
        self._faulty.close(self._name, self.rank, loses=True)

    def close(self, *, abort: bool) -> None:
        self._faulty.close(self._name, self.rank, loses=abort)
