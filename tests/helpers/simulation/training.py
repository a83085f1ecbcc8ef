"""Trains on simulated machines, and checks what comes of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allstep import Communicator
from allstep.comm.group import Topology
from allstep.comm.membership import Membership
from allstep.comm.missing import RankNames
from allstep.env import Launch
from allstep.errors import CommunicationError, PeerLostError, UsageError
from allstep.train.elastic_loop import loop_membership
from tests.helpers.compare import equal
from tests.helpers.simulation.faults import Faults
from tests.helpers.simulation.loop import Loop, undisturbed
from tests.helpers.simulation.network import FaultyNetwork, FaultyWire
from tests.helpers.simulation.scheduler import Process, Scheduler
from tests.helpers.simulation.system import SimulatedStore, SimulatedSystem

_TIMEOUT_S = 10.0  # for which the others wait, too


@dataclass
class Outcome:
    """How a worker has ended.

    Attributes:
        process: the worker's.
        state: what it has trained, if it came to the end.
        error: why not.
    """

    process: Process
    state: list[Tensor] | None = None
    error: Exception | None = None


class Simulation:
    """One training, by its seed.

    Args:
        seed: of the order, the delays and the faults.
        faults: what happens; None to draw it.
    """

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.scheduler = Scheduler(seed)
        self.faults = faults or Faults.draw(self.scheduler)
        self.network = FaultyNetwork(self.scheduler)
        self._launcher = Process(0)
        self._controller = Process(1)
        self._processes = [self._launcher, self._controller]
        self._store = SimulatedStore(self.network, self._launcher)
        self.outcomes: list[Outcome] = []
        self.generations: dict[int, set[tuple[str, ...]]] = {}
        self._num_entered = 0

    def run(self) -> None:
        """Runs it, and checks what came of it.

        Raises:
            AssertionError: if that is not what an elastic training promises.
        """
        size = len(self.faults.hosts)
        workers = [self._new_process(host) for host in self.faults.hosts]
        for rank, process in enumerate(workers):
            process.dies_at = self.faults.dies_at.get(rank, math.inf)
            at, process.freezes_for_s = self.faults.freezes_at.get(rank, (math.inf, 0.0))
            process.freezes_at = at
        for rank, process in enumerate(workers):
            wire = FaultyWire(
                self.network, "first", RankNames(range(size), rank, size), rank, workers, _TIMEOUT_S
            )
            comm = Communicator(
                wire, Topology.from_nodes(self.faults.hosts, rank), torch.device("cpu")
            )
            self._start(process, comm, _launch(rank, size))
        self.scheduler.start(self._controller, self._disturb, "controller")
        self.scheduler.run()
        self._check()

    def _new_process(self, host: int) -> Process:
        process = Process(len(self._processes), host)
        self._processes.append(process)
        return process

    def _start(self, process: Process, comm: Communicator, launch: Launch) -> None:
        outcome = Outcome(process)
        self.outcomes.append(outcome)

        def work() -> None:
            try:
                outcome.state = self._train(process, comm, launch)
                comm.close()
            except Exception as error:  # what is no word of allstep's fails the check
                outcome.error = error
                comm.abort()
            self.scheduler.end(process, killed=False)

        self.scheduler.start(process, work, "main")

    def _train(self, process: Process, comm: Communicator, launch: Launch) -> list[Tensor]:
        system = SimulatedSystem(self.network, self._store, process, self._processes)
        membership = loop_membership(launch, _TIMEOUT_S, system)
        loop = self._make_loop(comm, membership)
        self._begin(loop, process)
        with loop.elastic:
            self._num_entered += 1
            size = len(self.faults.hosts)
            if not launch.joins:  # before all have met there is nothing to go on with
                self.scheduler.pause(lambda: self._num_entered >= size)
            process.is_armed = True
            loop.run(lambda: self._note(membership), lambda step: self._save(loop, process, step))
        return loop.state()

    def _make_loop(self, comm: Communicator, membership: Membership) -> Loop:
        return Loop(comm, membership)

    def _begin(self, loop: Loop, process: Process) -> None:
        """Before a worker trains."""

    def _save(self, loop: Loop, process: Process, step: int) -> None:
        """Between two steps of a worker."""

    def _note(self, membership: Membership) -> None:
        names = tuple(member.name for member in membership.members)
        self.generations.setdefault(membership.generation, set()).add(names)

    def _disturb(self) -> None:
        faults, pause = self.faults, self.scheduler.pause
        pause(lambda: self._num_entered >= len(faults.hosts), 60.0)
        start_s = self.scheduler.now_s
        events: list[tuple[float, Callable[[], None]]] = [
            (at_s, lambda host=host, dies_at=dies_at: self._join(host, dies_at))
            for at_s, host, dies_at in faults.joins_at_s
        ]
        if faults.parts_at_s is not None:
            at_s, hosts, for_s = faults.parts_at_s
            events += [(at_s, lambda: self._part(hosts)), (at_s + for_s, lambda: self._part())]
        if faults.store_ends_at_s < math.inf:
            events.append(
                (faults.store_ends_at_s, lambda: self.scheduler.end(self._launcher, killed=True))
            )
        if faults.unconnected_at_s is not None:
            at_s, hosts = faults.unconnected_at_s
            events.append((at_s, lambda: self._unconnect(hosts)))
        for at_s, event in sorted(events, key=lambda pair: pair[0]):
            self.scheduler.sleep(max(0.0, start_s + at_s - self.scheduler.now_s))
            event()

    def _part(self, hosts: frozenset[int] = frozenset()) -> None:
        self.network.parted = hosts

    def _unconnect(self, hosts: frozenset[int]) -> None:
        self.network.unconnected = hosts

    def _join(self, host: int, dies_at: float) -> None:
        if all(outcome.process.has_ended for outcome in self.outcomes):
            return  # the launcher has, too
        process = self._new_process(host)
        process.dies_at, process.is_armed = dies_at, True
        comm = Communicator.single_process(timeout_s=_TIMEOUT_S)
        self._start(process, comm, _launch(0, 1, joins=True))

    def _check(self) -> None:
        assert self._store.rewritten == [], "a list was written twice"
        for number, lists in self.generations.items():
            assert len(lists) == 1, f"{len(lists)} groups are generation {number}"
        for outcome in self.outcomes:
            if outcome.state is not None:
                assert self._is_right(outcome.state), "another model"
        whole = [o for o in self.outcomes if o.state is not None]
        left = [o for o in self.outcomes if not self._was_taken(o)]
        assert whole or self._may_be_lost(left), [repr(o.error) for o in left]
        for outcome in left:
            if outcome.error is not None:
                is_first = outcome in self.outcomes[: len(self.faults.hosts)]
                self._check_error(outcome.error, is_first=is_first)

    def _is_right(self, state: Sequence[Tensor]) -> bool:
        return equal(state, undisturbed())

    def _was_taken(self, outcome: Outcome) -> bool:
        """Whether a fault has ended a worker."""
        return outcome.process.was_killed

    def _may_be_lost(self, left: Sequence[Outcome]) -> bool:
        """Whether nobody need have come to the end."""
        first = [o for o in left if o in self.outcomes[: len(self.faults.hosts)]]
        may_end = self.faults.store_ends_at_s < math.inf or self.faults.splits_workers
        return not first or may_end or self._may_be_left_behind

    @property
    def _may_be_left_behind(self) -> bool:
        """Whether the others may go on without one that is alive."""
        return bool(self.faults.freezes_at) or self.faults.parts_at_s is not None

    def _check_error(self, error: Exception, *, is_first: bool) -> None:
        text = str(error)
        expected = isinstance(error, UsageError) and "has ended" in text
        expected |= "have died" in text or "were lost before this one" in text
        expected &= not is_first or self._may_be_left_behind  # of one that comes too late
        if self.faults.store_ends_at_s < math.inf:
            expected |= isinstance(error, CommunicationError)
        if self._may_be_left_behind:
            expected |= isinstance(error, PeerLostError)
        if self.faults.unconnected_at_s is not None:
            expected |= "could not connect with" in text
        if self.faults.splits_workers:
            expected |= "each other in vain" in text
        assert expected, repr(error)


def _launch(rank: int, size: int, *, joins: bool = False) -> Launch:
    return Launch(
        "torchrun", rank, size, rank, size, 0, 1, "simulated", 1, "job", min_workers=1, joins=joins
    )
