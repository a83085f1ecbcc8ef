"""Who is in which generation of workers, as it stands in the launcher's store.

[Note: generations] Workers that train together are a generation; the first is the one that the
launcher has started. When one is lost, or when others wait to join, each worker of the generation
says in the store that the launcher serves how far its training is. Once all have come, but those
that have ended or that let the others wait for too long, one of them writes who is in the next
generation: those who came, the most advanced first, and those who wait. The first list counts for
all (`compare_set`), and there is one store: there are never two groups that both go on. Whoever
comes too late is on no list, and waits to join as any other.

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
_ROOT, _OVER, _STOP, _JOINERS = "allstep/membership", "over", "stop", "joiners"


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
    """

    members: tuple[Member, ...]
    num_seen: int

    @classmethod
    def read(cls, store: Store, number: int) -> "Generation | None":
        """What was written of it; None if nothing was yet."""
        key = f"{number}/members"
        if not store.check([key]):
            return None
        plain = json.loads(store.get(key))
        return cls(tuple(map(Member.read, plain["members"])), plain["num_seen"])

    def write(self, store: Store, number: int) -> None:
        """Makes it the generation of that number, unless another worker was faster."""
        plain = {"members": [m.text for m in self.members], "num_seen": self.num_seen}
        store.compare_set(f"{number}/members", "", json.dumps(plain))

    @property
    def has_died(self) -> bool:
        """Whether all its workers are known to have ended."""
        return all(member.place.has_ended() for member in self.members)


def stored_in(served: Store) -> Store:
    """The part of a launcher's store that is about generations."""
    return PrefixStore(_ROOT, served)


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
    store.append(_JOINERS, member.text + "\n")  # type: ignore[attr-defined]  # no stub


def joiners(store: Store) -> list[Member]:
    """All that have ever asked, in the order in which they did."""
    if not store.check([_JOINERS]):
        return []
    return list(map(Member.read, store.get(_JOINERS).decode().splitlines()))


def write_end(store: Store, code: int) -> None:
    """Says that the training is over, and with which code the launcher is to exit."""
    store.set(_OVER, str(code))


def is_over(store: Store) -> bool:
    """Whether it is."""
    return bool(store.check([_OVER]))


def signal_to_stop(store: Store) -> int | None:
    """The signal by which the launcher asks all workers to stop; None if it doesn't."""
    return int(store.get(_STOP)) if store.check([_STOP]) else None


def await_others(
    served: Store, came: Sequence[int], gives_up: Callable[[], bool] = lambda: False
) -> int | None:
    """Waits, for a launcher whose own workers have ended, as long as others go on.

    Args:
        served: the store.
        came: signals that the launcher got, and may still get; the others are asked to stop then.
        gives_up: looked at now and then; whether not to wait any more.

    Returns:
        The code with which the training has ended; None if it has not.
    """
    store, number = stored_in(served), -1
    while not (is_over(store) or gives_up()):
        if came and signal_to_stop(store) is None:
            store.set(_STOP, str(int(came[0])))
        number = newest(store, number)
        present = Generation.read(store, number)
        if number < 1 or present is None or present.has_died:  # the first is the launcher's own
            break
        time.sleep(POLL_S)
    return int(store.get(_OVER)) if is_over(store) else None


@contextmanager
def lost_store_told() -> Iterator[None]:
    """Raises PeerLostError where the store does not answer."""
    try:
        yield
    except RuntimeError as error:  # torch's, and allstep's
        if isinstance(error, CommunicationError):
            raise
        raise PeerLostError(
            "The store in which workers find each other is gone: the launcher that serves it has"
            f" ended. Resume the run from its newest checkpoint. ({error})"
        ) from error
