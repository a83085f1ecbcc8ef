"""Who is in which generation of workers, as it stands in the run's store.

[Note: generations] Workers that train together are a generation; the first is the one that the
launcher has started. When one is lost, or when others wait to join, each worker of the generation
says in the store, which the launcher or `allstep store` serves, how far its training is. Once all
have come, but those that have ended or that let the others wait for too long, one of them writes
who is in the next generation: those who came, the most advanced first, and those who wait. The
first list counts for all (`compare_set`), and there is one store: there are never two groups that
both go on. Whoever comes too late is on no list, and waits to join as any other. So does one that
was let in where the most advanced worker was, if that is lost before it had the state from it.

[Note: signs of life] A worker's end is seen at once on its own host, and by the connections of its
generation. Who holds none, as a worker that waits to join or the launcher, can't tell a worker of
another host that is lost from one in a long step. So each worker writes a number in the store once
a second, from a thread; where it stays the same for a minute, the worker counts as ended.

A launcher, which sees its own workers' ends at once, writes them in the store, for other hosts.

A generation has met when all of it have said so, in the store, too. If one ends before, all of them
make the next one.
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
SIGN_S = 1.0  # between two signs of life
_SILENCE_S = 60.0
_ROOT, _OVER, _STOP, _JOINERS, _ENDED = "allstep/membership", "over", "stop", "joiners", "ended"


@dataclass(frozen=True)
class Member:
    """A worker of a generation.

    Attributes:
        name: unlike for all workers of the run.
        place: where it runs.
        progress: how far its training is; -1 for one that has just been started.
    """

    name: str
    place: Place
    progress: int = -1

    @classmethod
    def read(cls, text: str) -> "Member":
        """Undoes `text`."""
        plain = json.loads(text)
        return cls(**(plain | {"place": Place(**plain["place"])}))

    @property
    def text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Generation:
    """The workers that train together, until one is lost or others join.

    Attributes:
        members: by rank.
        num_seen: of those that have ever asked to join, how many were looked at.
        num_left_out: how many were ever left out as they had come in vain, with nobody lost.
    """

    members: tuple[Member, ...]
    num_seen: int
    num_left_out: int = 0

    @classmethod
    def read(cls, store: Store, number: int) -> "Generation | None":
        """What was written of it; None if nothing was yet."""
        key = f"{number}/members"
        if not store.check([key]):
            return None
        plain = json.loads(store.get(key))
        return cls(**(plain | {"members": tuple(map(Member.read, plain["members"]))}))

    def write(self, store: Store, number: int) -> None:
        """Makes it the generation of that number, unless another worker was faster."""
        plain = vars(self) | {"members": [m.text for m in self.members]}
        store.compare_set(f"{number}/members", "", json.dumps(plain))


@dataclass(frozen=True)
class Requests:
    """What is asked of a generation.

    Attributes:
        generation: which.
        others_wait: whether workers wait to join.
        signal: by which the launcher asks all to stop; None if it doesn't.
    """

    generation: int = -1
    others_wait: bool = False
    signal: int | None = None


class Liveness:
    """Whether workers still live, for one that has no connections to them. [Note: signs of life]

    Args:
        store: from `stored_in`.
        has_ended: whether it is known of a place that the process there has ended.
        now_s: the time.
    """

    def __init__(
        self,
        store: Store,
        has_ended: Callable[[Place], bool] = Place.has_ended,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._has_ended, self._now_s = store, has_ended, now_s
        self._signs: dict[str, tuple[bytes, float]] = {}  # by name; the last, and since when
        self._looked_at_s = -SIGN_S

    def all_have_ended(self, members: Sequence[Member]) -> bool:
        """Whether nobody of them lives."""
        if self._now_s() - self._looked_at_s >= SIGN_S:
            self._looked_at_s = self._now_s()
            self._signs = {member.name: self._sign(member) for member in members}
        return all(self._has_ended(m.place) or self._is_silent(m) for m in members)

    def _sign(self, member: Member) -> tuple[bytes, float]:
        key = _sign_of(member.name)
        sign = self._store.get(key) if self._store.check([key]) else b""
        last, since_s = self._signs.get(member.name, (b"", self._now_s()))
        return (last, since_s) if sign == last else (sign, self._now_s())

    def _is_silent(self, member: Member) -> bool:
        if member.name not in self._signs:  # not looked at yet
            return False
        return self._now_s() - self._signs[member.name][1] > _SILENCE_S


def give_sign(store: Store, member: Member, number: int) -> None:
    """A worker lives.

    Args:
        store: from `stored_in`.
        member: the worker.
        number: another one each time.
    """
    store.set(_sign_of(member.name), str(number))


def _sign_of(name: str) -> str:
    return f"sign/{name}"


def stored_in(served: Store, job_id: str) -> Store:
    """The part of a store that is about the generations of one of its runs."""
    return PrefixStore(f"{_ROOT}/{job_id}", served)


def newest(store: Store, known: int = -1) -> int:
    """The last generation that is written; -1 before the first has met.

    Args:
        store: from `stored_in`.
        known: one that is written, or -1.
    """
    while store.check([f"{known + 1}/members"]):
        known += 1
    return known


def ask_to_join(store: Store, member: Member) -> None:
    """Says who wants to join, in one message: nobody asks without a name."""
    _append(store, _JOINERS, member.text)


def joiners(store: Store) -> list[Member]:
    """All that have ever asked, in the order in which they did."""
    return list(map(Member.read, _lines(store, _JOINERS)))


def write_end(store: Store, place: Place, code: int) -> None:
    """A worker says that the training is over, and with which code its launcher is to exit."""
    _append(store, _OVER, f"{code} {process_of(place)}")


def codes_at_end(store: Store) -> dict[str, int]:
    """The code that each worker gave which came to the end, by its process."""
    lines = (line.partition(" ") for line in _lines(store, _OVER))
    return {process: int(code) for code, _, process in lines}


def note_ended(served: Store, job_id: str, place: Place) -> int | None:
    """A launcher says that a worker's process has ended.

    Args:
        served: the store.
        job_id: of the run.
        place: where the worker ran.

    Returns:
        The code that the worker gave with `write_end`; None if it did not.
    """
    store = stored_in(served, job_id)
    _append(store, _ENDED, process_of(place))
    return codes_at_end(store).get(process_of(place))


def noted_ended(store: Store) -> set[str]:
    """Processes of which launchers have said so."""
    return set(_lines(store, _ENDED))


def process_of(place: Place) -> str:
    """Unlike any other's, on whatever host."""
    return f"{place.pid} {place.born} {place.space}"


def _append(store: Store, key: str, line: str) -> None:
    store.append(key, line + "\n")  # type: ignore[attr-defined]  # no stub


def _lines(store: Store, key: str) -> list[str]:
    return store.get(key).decode().splitlines() if store.check([key]) else []


def is_over(store: Store) -> bool:
    """Whether it is."""
    return bool(store.check([_OVER]))


def signal_to_stop(store: Store) -> int | None:
    """The signal by which the launcher asks all workers to stop; None if it doesn't."""
    return int(store.get(_STOP)) if store.check([_STOP]) else None


@contextmanager
def lost_store_told() -> Iterator[None]:
    """Raises PeerLostError where the store does not answer."""
    try:
        yield
    except RuntimeError as error:  # torch's, and allstep's
        if isinstance(error, CommunicationError):
            raise
        raise PeerLostError(
            "The store in which workers find each other is gone: the launcher, or `allstep store`,"
            " that serves it has ended. Start the run again, from its newest checkpoint if it has"
            f" one. ({error})"
        ) from error


@lost_store_told()
def await_others(
    served: Store, job_id: str, came: Sequence[int], gives_up: Callable[[], bool] = lambda: False
) -> int | None:
    """Waits, for a launcher whose own workers have ended, as long as others go on.

    Args:
        served: the store.
        job_id: of the run.
        came: signals that the launcher got, and may still get; the others are asked to stop then.
        gives_up: looked at now and then; whether not to wait any more.

    Returns:
        The code with which the training has ended; None if it has not.

    Raises:
        PeerLostError: if the store is gone, which another process serves.
    """
    store, number = stored_in(served, job_id), -1
    liveness = Liveness(store)
    while not (is_over(store) or gives_up()):
        if came and signal_to_stop(store) is None:
            store.set(_STOP, str(int(came[0])))
        number = newest(store, number)
        present = Generation.read(store, number)
        if number < 1 or present is None:  # the first is the launcher's own
            break
        if liveness.all_have_ended(present.members):
            break
        time.sleep(POLL_S)
    if newest(store) < 0:  # who waits to join has nobody whose life to look at
        store.set(_OVER, "")
    return next(iter(codes_at_end(store).values()), None)
