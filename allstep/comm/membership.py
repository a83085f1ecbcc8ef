"""A worker's membership among those that train together, while workers come and go."""

import atexit
import logging
import math
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

from torch._C._distributed_c10d import PrefixStore, Store

from allstep.comm.activity import Activity
from allstep.comm.communicator import Communicator
from allstep.comm.generations import (
    HEARTBEAT_S,
    POLL_S,
    Generation,
    Liveness,
    Member,
    Requests,
    ask_to_join,
    is_over,
    joiners,
    newest,
    noted_ended,
    process_of,
    raising_if_store_lost,
    signal_to_stop,
    stored_in,
    write_end,
    write_heartbeat,
)
from allstep.comm.group import Topology
from allstep.comm.initialise import set_up_logging
from allstep.comm.missing import RankNames
from allstep.comm.places import Place
from allstep.comm.system import CONNECT_S, System
from allstep.comm.wire import SingleProcessWire, Wire
from allstep.env import Launch
from allstep.errors import CollectiveTimeoutError, CommunicationError, PeerLostError, UsageError

_LOOK_S = 0.2  # time between two checks for workers that wait, or have ended
_NOTICE_S = 0.5  # time in which workers mostly notice by themselves that one has ended
_MOST_ATTEMPTS = 2  # attempts of a worker to join; the others wait during each
_MOST_WAITS = 3  # waits of the same workers at the same step after which the run ends


class Membership:
    """This worker's membership in a run whose workers may come and go. [Note: generations]

    Args:
        launch: this worker's launch, with the store's address and the least number of workers.
        rejoins: whether a worker that the others have left behind asks to join like any other;
            otherwise it ends with an error.
        lets_in: progress -> whether workers that wait to join may be let in when the most advanced
            of the others has come so far.
        grace_s: longest time to wait for a worker that is not known to have ended: it may be in the
            middle of a long step.
        notice_s: how long a worker waits to join until it says so.
        system: the machines and the network.

    Attributes:
        members: the present generation's workers, by rank; empty for a worker that waits to join.
        generation: its number; -1 for a worker that waits to join.

    Raises:
        UsageError: if there is no store, or if it does not answer.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        grace_s: float,
        notice_s: float = 10.0,
        rejoins: bool = True,
        lets_in: Callable[[int], bool] = lambda progress: True,
        system: System | None = None,
    ) -> None:
        if launch.min_workers is None:
            raise UsageError(
                "`elastic` needs a launcher that lets workers go on when one is lost, and serves"
                " the store in which they find each other: start them with `allstep train RECIPE"
                " --elastic --workers N`, or `allstep launch --elastic --workers N -- script.py`."
            )
        assert launch.master_addr is not None and launch.master_port is not None
        self.members: tuple[Member, ...] = ()
        self.generation = -1
        self._joins = launch.joins
        self._min_workers = launch.min_workers
        self._grace_s, self._notice_s = grace_s, notice_s
        self._rejoins, self._lets_in = rejoins, lets_in
        self._system = system or System(launch.master_addr)
        self._own = Member(uuid.uuid4().hex, self._system.own_place())
        self._end_asked, self._end_told = self._system.new_event(), self._system.new_event()
        self._num_seen = 0  # requests to join that have been handled
        self._num_left_out = 0  # workers that joined in vain, as the present list says
        self._num_attempts = 0  # this worker's attempts to join in vain
        self._num_waits = 0  # waits of the present workers for each other, at the same step
        self._requests = Requests()
        self._has_lost_store = self._is_over = False
        self._end_code = 0
        # As long as the others may wait for this worker, it can still come back.
        served = self._system.open_store(launch.master_addr, launch.master_port, 2 * grace_s)
        self._store = stored_in(served, launch.job_id)
        self._ended_elsewhere: set[str] = set()  # other hosts' ended processes, by their launchers
        self._asked_at_s = -_LOOK_S
        self._liveness = Liveness(self._store, self._has_ended, self._system.now_s)
        self._watched: tuple[Communicator, int] | None = None  # of the watched generation

    def begin(self, comm: Communicator) -> None:
        """Records the first generation, whose workers have met. Collective."""
        texts = comm.all_gather_object(self._own.text)
        self.members, self.generation = tuple(map(Member.read, texts)), 0
        self.watch(comm)
        if comm.rank == 0:
            Generation(self.members, 0).write(self._store, 0)

    @property
    def waits(self) -> bool:
        """Whether this worker wants to join a run that others have begun, and has not yet."""
        return self._joins and not self.members

    @property
    def rank(self) -> int:
        """This worker's rank in the present generation."""
        return [member.name for member in self.members].index(self._own.name)

    def publish(self, name: str, text: str) -> None:
        """Writes a text to the store for workers that join later.

        Raises:
            PeerLostError: if the store is gone.
        """
        with raising_if_store_lost():
            self._store.set(f"text/{name}", text)

    def read(self, name: str) -> str:
        """Waits for a text that `publish` wrote, and returns it.

        Raises:
            PeerLostError: if the store is gone.
            UsageError: if the run has ended.
        """
        key = f"text/{name}"
        with raising_if_store_lost():
            while not self._store.check([key]):
                self._check_can_join(-1)
                self._system.sleep(POLL_S)
            return self._store.get(key).decode()

    def _check_can_join(self, known: int) -> None:
        """Raises if there are no workers any more that this one could join.

        Args:
            known: number of a generation that is written, or -1.
        """
        if is_over(self._store):
            raise UsageError("The run has ended: there is nothing to join any more.")
        present = Generation.read(self._store, newest(self._store, known))
        if present is not None and self._liveness.all_have_ended(present.members):
            raise PeerLostError(
                "All workers of the run have died, or send no heartbeat any more: there is"
                " nothing to join. Resume it from its newest checkpoint."
            )

    @property
    def is_over(self) -> bool:
        """Whether a worker has recorded that the training is over."""
        with raising_if_store_lost():
            return is_over(self._store)

    def end(self, code: int = 0) -> None:
        """Records that the training is over, so that no worker joins any more.

        Args:
            code: exit code for a launcher all of whose own workers were lost.
        """
        # If the store's host was lost silently, a call to the store gets no answer for minutes.
        if not self._has_lost_store:
            self._end_code = code
            self._end_asked.set()
            self._end_told.wait(CONNECT_S)
        self.leave()

    def leave(self) -> None:
        """Ends this worker's membership: it no longer watches the others."""
        self._is_over = True

    def requests(self) -> Requests:
        """The requests to this generation, which rank 0 read from the store a moment ago.

        Raises:
            PeerLostError: if this worker's launcher has ended, which would have to end it.
        """
        self._check_launcher()
        found = self._requests
        return found if found.generation == self.generation else Requests(signal=found.signal)

    def _check_launcher(self) -> None:
        if self._system.launcher_has_ended():
            raise PeerLostError("The launcher of this worker has ended, and so does the worker.")

    def watch(self, comm: Communicator) -> None:
        """Interrupts the present generation's waits once the generation can't go on.

        Usually workers notice by a closed connection that one of them has ended, or has left for
        the next generation. But they may wait for a worker that is in a long step, for one whose
        connection was closed just when they began to wait, or for the meeting of a group to which
        one of them won't come any more. A thread checks for these; it also writes
        [Note: heartbeats] and reads the store for `requests`.

        Args:
            comm: the generation's communicator.
        """
        is_first = self._watched is None
        self._watched = comm, self.generation
        if is_first:
            atexit.register(self.leave)  # a store's call that outlives the interpreter aborts
            self._system.start_thread(self._watch, "allstep membership")
        with suppress(RuntimeError):  # a lost store, which the thread handles
            self._look_for_requests()  # or the first steps would not know of workers that wait

    def _watch(self) -> None:
        next_heartbeat_s = self._system.now_s()
        for number in count():
            try:
                if self._system.now_s() >= next_heartbeat_s and not self._has_lost_store:
                    next_heartbeat_s = self._system.now_s() + HEARTBEAT_S
                    write_heartbeat(self._store, self._own, number)
                if self._end_asked.wait(_LOOK_S):
                    self._end_asked.clear()
                    write_end(self._store, self._own.place, self._end_code)
                    self._end_told.set()
                if self._is_over:
                    return
                self._look_for_requests()
                self._look_after_generation()
            except RuntimeError:
                self._go_on_without_store()

    def _go_on_without_store(self) -> None:
        """Lets the present workers train on without the store.

        [Note: lost store] The store only decides which workers go on when some are lost or join.
        Until then each step takes all present workers, so there can't be two groups that both go
        on. The next loss of a worker ends the run, and no worker can join.
        """
        self._has_lost_store = True
        self._end_told.set()
        if not self._is_over:
            logging.getLogger("allstep").warning(
                "the store in which workers find each other is gone: the run goes on until its"
                " end, or until a worker is lost; no others can join"
            )

    def _look_for_requests(self) -> None:
        """Reads the requests for `look`, on rank 0, so that no step waits for the store."""
        generation, members = self.generation, self.members
        if self._has_lost_store or not members or members[0].name != self._own.name:
            return
        signal = signal_to_stop(self._store)
        others_wait = not all(self._has_ended(member.place) for member in self._waiting())
        self._requests = Requests(generation, others_wait, signal)

    def _look_after_generation(self) -> None:
        watched = self._watched
        if watched is None or self._goes_on(watched[1]):
            return
        self._system.sleep(_NOTICE_S)
        comm, generation = watched
        if generation == self.generation and self._watched == watched and not self._is_over:
            comm.interrupt()

    def _goes_on(self, generation: int) -> bool:
        """Whether a generation can go on; True as well if it has been left already."""
        places = [member.place for member in self.members]
        if generation != self.generation:
            return True
        if any(map(self._has_ended, places)):
            return False
        return self._has_lost_store or not self._store.check([f"{generation + 1}/begun"])

    def next(self, progress: int) -> None:
        """Becomes a member of the next generation, or waits for a later one that includes it.

        Args:
            progress: how far this worker's training is, compared with others'; -1 if it has not
                begun.

        Raises:
            PeerLostError: if fewer than `min_workers` are left, if the store or the launcher is
                gone, or if the others have left this worker behind and it may not join again.
            CollectiveTimeoutError: if this worker has joined in vain too often, or the same workers
                have waited for each other too often.
            UsageError: if the run has ended meanwhile.
        """
        self._check_launcher()
        self._own = replace(self._own, progress=progress)
        with raising_if_store_lost():
            if self.members:
                self._come()
            if self.members and self._enter(self.generation + 1):
                return
            if self.members and progress < 0 and self._came_in_vain():
                self._note_attempt()
            if self.members and not self._rejoins and progress >= 0:
                raise PeerLostError(
                    "The others have gone on without this worker, which was stopped or in a step"
                    f" for more than {self._grace_s:g} s: start another in its place."
                )
            self._wait_to_join()

    def _came_in_vain(self) -> bool:
        """Whether the next list leaves out workers that just came, not ones lost or late."""
        new = Generation.read(self._store, self.generation + 1)
        return new is not None and new.num_left_out > self._num_left_out

    def _note_attempt(self) -> None:
        self._num_attempts += 1
        if self._num_attempts == _MOST_ATTEMPTS:
            raise CollectiveTimeoutError(
                "This worker reaches the run's store, but could not connect with the other workers,"
                f" or get the training's state from them, in {_MOST_ATTEMPTS} attempts; they go on"
                " without it. Open all TCP ports between the hosts of the workers, in both"
                " directions, or give the run a longer `timeout_s`."
            )

    def _come(self) -> None:
        """Records that this worker has come, and waits until the list is written."""
        generation = self.generation + 1
        key = f"{generation}/members"
        self._store.set(f"{generation}/begun", "")
        self._store.set(f"{generation}/came/{self._own.name}", self._own.text)
        deadline_s = self._system.now_s() + self._grace_s
        missing = list(self.members)
        has_ended = self._has_ended
        while not self._store.check([key]):
            missing = [m for m in missing if not self._came(generation, m)]
            is_late = self._system.now_s() > deadline_s
            if is_late or all(has_ended(m.place) for m in missing):
                self._write_list(generation)
            else:
                self._system.sleep(POLL_S)

    def _has_ended(self, place: Place) -> bool:
        """Whether the process of a place is known to have ended."""
        if self._system.has_ended(place):
            return True
        if not place.space or place.space == self._own.place.space:
            return False
        if self._system.now_s() - self._asked_at_s >= _LOOK_S and not self._has_lost_store:
            self._asked_at_s = self._system.now_s()
            with suppress(RuntimeError):  # a lost store, which the thread handles
                self._ended_elsewhere = noted_ended(self._store)
        return process_of(place) in self._ended_elsewhere

    def _came(self, generation: int, member: Member) -> bool:
        return bool(self._store.check([f"{generation}/came/{member.name}"]))

    def _write_list(self, generation: int) -> None:
        came = [
            Member.read(self._store.get(f"{generation}/came/{m.name}").decode())
            for m in self.members
            if self._came(generation, m)
        ]
        came.sort(key=lambda member: -member.progress)  # stable: the others keep their order
        lets_in, is_whole = self._lets_in(came[0].progress), len(came) == len(self.members)
        # After some joined in vain, only one at a time, so that one that can't connect holds back
        # no others.
        waiting = self._waiting()[: 1 if self._num_left_out else None] if lets_in else []
        begun = [member for member in came if member.progress >= 0]
        if begun and (not lets_in or (is_whole and len(begun) >= self._min_workers)):
            # Leaves out workers without the state: either no worker was lost, so the others waited
            # for these in vain; or the one that was lost had let them in at a later step, which no
            # remaining worker has reached.
            came = begun
        num_left_out = self._num_left_out + (len(self.members) - len(came) if is_whole else 0)
        alive = (member for member in waiting if not self._has_ended(member.place))
        new = Generation((*came, *alive), self._num_seen + len(waiting), num_left_out)
        new.write(self._store, generation)

    def _waiting(self) -> list[Member]:
        """The workers whose requests to join have not been handled."""
        return joiners(self._store)[self._num_seen :]

    def _enter(self, generation: int) -> bool:
        """Adopts a generation's list as the present one; returns whether this worker is on it."""
        new = Generation.read(self._store, generation)
        if new is None or self._own.name not in [member.name for member in new.members]:
            return False
        has_left_out = new.num_left_out > self._num_left_out
        self._num_waits = self._num_waits + 1 if new.members == self.members else 1
        # In this order, for the thread that reads requests.
        self._num_seen, self.members, self.generation = new.num_seen, new.members, generation
        self._num_left_out = new.num_left_out
        if has_left_out and self.rank == 0:
            logging.getLogger("allstep").warning(
                "goes on without workers that had just come: they could not connect with all others"
                " in time, or not get the training's state; they may try once more"
            )
        if self._num_waits == _MOST_WAITS:
            raise CollectiveTimeoutError(
                f"The same {len(self.members)} workers have waited for each other in vain"
                f" {_MOST_WAITS} times in one place of the training, and none has ended. Does a"
                f" step, or a checkpoint, take longer than `timeout_s` (={self._grace_s:g})? Then"
                " give a longer one. Else look at the network between their hosts."
            )
        if len(self.members) < self._min_workers:
            raise PeerLostError(
                f"{len(self.members)} workers are left, fewer than `min_workers`"
                f" (={self._min_workers}): the run ends; resume it with enough of them."
            )
        return True

    def _wait_to_join(self) -> None:
        """Asks to join, and waits for a generation that includes this worker."""
        self._own = replace(self._own, name=uuid.uuid4().hex)
        generation = newest(self._store)
        ask_to_join(self._store, self._own)
        notice_at_s = self._system.now_s() + self._notice_s
        while True:
            if self._store.check([f"{generation + 1}/members"]):
                generation += 1
                if self._enter(generation):
                    return
            else:
                self._check_can_join(generation)
                if self._system.now_s() > notice_at_s:
                    notice_at_s = math.inf
                    self._tell_that_it_waits(generation)
                self._system.sleep(POLL_S)

    def _tell_that_it_waits(self, generation: int) -> None:
        """Logs that this worker waits to join, and for whom."""
        present = Generation.read(self._store, generation)
        whom = "the first workers to meet"
        if present is not None:
            whom = f"the end of a step of rank 0 ({present.members[0].place})"
        logging.getLogger("allstep").info(
            f"this worker waits to join for {self._notice_s:g} s, for {whom}; `allstep why RUN`"
            " says what the others are doing"
        )

    def meet(self, timeout_s: float, activity: Activity) -> Wire:
        """Connects to the other workers of this generation; returns the wire.

        Raises:
            PeerLostError: if one of them has ended before all had met, or the store is gone.
            CollectiveTimeoutError: if not all have met in time.
        """
        size, rank = len(self.members), self.rank
        store = PrefixStore(str(self.generation), self._store)
        if size == 1:
            return SingleProcessWire(timeout_s, activity)
        places = [member.place for member in self.members]
        names = RankNames(range(size), rank, size, store, places, activity, self._has_ended)
        deadline_s = self._system.now_s() + 2 * CONNECT_S
        check = partial(self._check_all_there, store, names, deadline_s)
        with raising_if_store_lost():
            try:
                wire = self._system.connect(store, names, timeout_s, check)
            except CommunicationError:
                store.set("failed", "")
                raise
            try:
                store.add("num_met", 1)
                while store.add("num_met", 0) < size:
                    check()
                    self._system.sleep(POLL_S)
            except CommunicationError:
                store.set("failed", "")
                wire.close(abort=True)
                raise
        return wire

    def _check_all_there(self, store: Store, names: RankNames, deadline_s: float) -> None:
        if store.check(["failed"]):
            raise PeerLostError("A worker was lost before all had met again.")
        if self._system.now_s() > deadline_s:
            raise CollectiveTimeoutError("Not all workers have met again in time.")
        names.check_all_there("regroup")


def regroup(comm: Communicator, membership: Membership, progress: int) -> None:
    """Turns a communicator into that of the next generation's workers; all of them call it.

    Whatever was made with it before, such as an exchange, can't be used any more.

    Args:
        comm: the present generation's communicator, in whatever state; that of a single process for
            a worker that joins.
        membership: this worker's membership.
        progress: how far its training is, compared with others'; -1 if it has not begun.

    Raises:
        PeerLostError: if too few workers are left, or if the store or the launcher is gone.
        CollectiveTimeoutError: as in `Membership.next`.
        UsageError: if the run has ended.
    """
    comm.abort()
    comm.activity.enter("regroup")
    while True:
        membership.next(progress)
        with suppress(PeerLostError, CollectiveTimeoutError):
            wire = membership.meet(comm.timeout_s, comm.activity)
            break
    hosts: Sequence[str] = [member.place.host for member in membership.members]
    comm.become(wire, Topology.from_nodes(hosts, membership.rank))
    set_up_logging(comm.rank)
    membership.watch(comm)
