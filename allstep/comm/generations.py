"""The members of each generation of workers, as the run's store records them.

[Note: generations] Workers that train together are a generation; the first one is made up of the
workers that the launcher started. When a worker is lost, or when others wait to join, each worker
of the generation writes its progress to the store, which the launcher or `allstep store` serves.
Once all have done so, except those that have ended or that keep the others waiting for too long,
one of them writes the list of the next generation: the workers that came, the most advanced first,
and those that wait. The first list in the store counts for all (`compare_set`), and there is only
one store: so two groups can never both go on. A worker that comes too late is on no list, and waits
to join like any other. So does a worker that was let in at the place of the most advanced one, if
that one is lost before it has passed on its state.

[Note: heartbeats] A worker's end is noticed at once on its own host, and by its generation's
connections. A process without connections, such as a worker that waits to join or the launcher,
can't tell a lost worker of another host from one in a long step. So each worker writes a new number
to the store once a second, from a thread; if the number stays the same for a minute, the worker
counts as ended.

A launcher, which notices its own workers' ends at once, records them in the store for other hosts.

A generation has met when all its members have said so in the store. If one ends before that, the
others make the next generation.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import PrefixStore, Store

from allstep.comm.places import Place
from allstep.errors import CommunicationError, PeerLostError

POLL_S = 0.01
HEARTBEAT_S = 1.0  # time between two heartbeats
_SILENCE_S = 60.0
_ROOT, _OVER, _STOP, _JOINERS, _ENDED = "allstep/membership", "over", "stop", "joiners", "ended"


@dataclass(frozen=True)
class Member:
    """A worker of a generation.

    Attributes:
        name: a name that no other worker of the run has.
        place: where the worker runs.
        progress: how far its training is; -1 for a worker that has just been started.
    """

    name: str
    place: Place
    progress: int = -1

    @classmethod
    def read(cls, text: str) -> "Member":
        """The inverse of `text`."""
        plain = json.loads(text)
        return cls(**(plain | {"place": Place(**plain["place"])}))

    @property
    def text(self) -> str:
        """The member as text for the store."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Generation:
    """The workers that train together, until one is lost or others join.

    Attributes:
        members: the workers, by rank.
        num_seen: number of requests to join that have been handled so far.
        num_left_out: number of workers so far that had joined without getting the state, and were
            left out again although no worker was lost.
    """

    members: tuple[Member, ...]
    num_seen: int
    num_left_out: int = 0

    @classmethod
    def read(cls, store: Store, number: int) -> "Generation | None":
        """The generation of that number; None if it has not been written yet."""
        key = f"{number}/members"
        if not store.check([key]):
            return None
        plain = json.loads(store.get(key))
        return cls(**(plain | {"members": tuple(map(Member.read, plain["members"]))}))

    def write(self, store: Store, number: int) -> None:
        """Writes this as the generation of that number, unless another worker was faster."""
        plain = vars(self) | {"members": [m.text for m in self.members]}
        store.compare_set(f"{number}/members", "", json.dumps(plain))


@dataclass(frozen=True)
class Requests:
    """Requests to a generation.

    Attributes:
        generation: its number.
        others_wait: whether workers wait to join.
        signal: the signal by which the launcher asks all workers to stop; None if it doesn't.
    """

    generation: int = -1
    others_wait: bool = False
    signal: int | None = None


class Liveness:
    """Tells which workers still live, without connections to them. [Note: heartbeats]

    Args:
        store: the run's store, from `stored_in`.
        has_ended: place -> whether the process there is known to have ended.
        now_s: function that returns the time in seconds.
    """

    def __init__(
        self,
        store: Store,
        has_ended: Callable[[Place], bool] = Place.has_ended,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._has_ended, self._now_s = store, has_ended, now_s
        self._heartbeats: dict[str, tuple[bytes, float]] = {}  # name -> the last, when first read
        self._looked_at_s = -HEARTBEAT_S

    def all_have_ended(self, members: Sequence[Member]) -> bool:
        """Whether none of the members lives any more."""
        if self._now_s() - self._looked_at_s >= HEARTBEAT_S:
            self._looked_at_s = self._now_s()
            self._heartbeats = {member.name: self._read_heartbeat(member) for member in members}
        return all(self._has_ended(m.place) or self._is_silent(m) for m in members)

    def _read_heartbeat(self, member: Member) -> tuple[bytes, float]:
        key = _heartbeat_key(member.name)
        number = self._store.get(key) if self._store.check([key]) else b""
        last, since_s = self._heartbeats.get(member.name, (b"", self._now_s()))
        return (last, since_s) if number == last else (number, self._now_s())

    def _is_silent(self, member: Member) -> bool:
        if member.name not in self._heartbeats:  # not read yet
            return False
        return self._now_s() - self._heartbeats[member.name][1] > _SILENCE_S


def write_heartbeat(store: Store, member: Member, number: int) -> None:
    """Writes a worker's heartbeat. [Note: heartbeats]

    Args:
        store: the run's store, from `stored_in`.
        member: the worker.
        number: a different number each time.
    """
    store.set(_heartbeat_key(member.name), str(number))


def _heartbeat_key(name: str) -> str:
    return f"heartbeat/{name}"


def stored_in(served: Store, job_id: str) -> Store:
    """The part of a served store that records the generations of one run."""
    return PrefixStore(f"{_ROOT}/{job_id}", served)


def newest(store: Store, known: int = -1) -> int:
    """Number of the last generation that is written; -1 before the first has met.

    Args:
        store: the run's store, from `stored_in`.
        known: number of a generation that is written, or -1.
    """
    while store.check([f"{known + 1}/members"]):
        known += 1
    return known


def ask_to_join(store: Store, member: Member) -> None:
    """Requests to join, in a single message, so that no request lacks a name."""
    _append(store, _JOINERS, member.text)


def joiners(store: Store) -> list[Member]:
    """All workers that have ever asked to join, in the order of their requests."""
    return list(map(Member.read, _lines(store, _JOINERS)))


def write_end(store: Store, place: Place, code: int) -> None:
    """Records that the training is over, and the code with which the worker's launcher exits."""
    _append(store, _OVER, f"{code} {process_of(place)}")


def codes_at_end(store: Store) -> dict[str, int]:
    """Process -> exit code, for each worker that has recorded the end."""
    lines = (line.partition(" ") for line in _lines(store, _OVER))
    return {process: int(code) for code, _, process in lines}


def note_ended(served: Store, job_id: str, place: Place) -> int | None:
    """Records, for a launcher, that a worker's process has ended.

    Args:
        served: the store that the launcher uses.
        job_id: id of the run.
        place: where the worker ran.

    Returns:
        The exit code that the worker gave `write_end`; None if it did not call it.
    """
    store = stored_in(served, job_id)
    _append(store, _ENDED, process_of(place))
    return codes_at_end(store).get(process_of(place))


def noted_ended(store: Store) -> set[str]:
    """The processes that launchers have recorded as ended."""
    return set(_lines(store, _ENDED))


def process_of(place: Place) -> str:
    """An id of a process that no other has, on any host."""
    return f"{place.pid} {place.born} {place.space}"


def _append(store: Store, key: str, line: str) -> None:
    store.append(key, line + "\n")  # type: ignore[attr-defined]  # no stub


def _lines(store: Store, key: str) -> list[str]:
    return store.get(key).decode().splitlines() if store.check([key]) else []


def is_over(store: Store) -> bool:
    """Whether a worker has recorded that the training is over."""
    return bool(store.check([_OVER]))


def signal_to_stop(store: Store) -> int | None:
    """The signal by which the launcher asks all workers to stop; None if it doesn't."""
    return int(store.get(_STOP)) if store.check([_STOP]) else None


@contextmanager
def raising_if_store_lost() -> Iterator[None]:
    """Raises PeerLostError if the store does not answer."""
    try:
        yield
    except RuntimeError as error:  # torch's error, or allstep's
        if isinstance(error, CommunicationError):
            raise
        raise PeerLostError(
            "The store in which workers find each other is gone: the launcher, or `allstep store`,"
            " that serves it has ended. Start the run again, from its newest checkpoint if it has"
            f" one. ({error})"
        ) from error


@raising_if_store_lost()
def await_others(
    served: Store, job_id: str, came: Sequence[int], gives_up: Callable[[], bool] = lambda: False
) -> int | None:
    """Makes a launcher whose own workers have ended wait as long as other workers go on.

    Args:
        served: the store that the launcher uses.
        job_id: id of the run.
        came: signals that the launcher has got, also during the call; the first asks the others to
            stop.
        gives_up: called from time to time; whether to stop waiting.

    Returns:
        The exit code with which the training ended; None if it did not.

    Raises:
        PeerLostError: if another process served the store and has ended.
    """
    store, number = stored_in(served, job_id), -1
    liveness = Liveness(store)
    while not (is_over(store) or gives_up()):
        if came and signal_to_stop(store) is None:
            store.set(_STOP, str(int(came[0])))
        number = newest(store, number)
        present = Generation.read(store, number)
        if number < 1 or present is None:  # the first generation is the launcher's own workers
            break
        if liveness.all_have_ended(present.members):
            break
        time.sleep(POLL_S)
    if newest(store) < 0:  # workers that wait to join have no generation to watch
        store.set(_OVER, "")
    return next(iter(codes_at_end(store).values()), None)
