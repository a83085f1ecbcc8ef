"""Workers that ask to join an elastic training, as its store has them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

from torch._C._distributed_c10d import Store, TCPStore

from allstep.cli.exits import StoreAddress, StoreRecord
from allstep.cli.store import read_address
from allstep.comm.generations import (
    Generation,
    Member,
    ask_to_join,
    joiners,
    note_ended,
    signal_to_stop,
    stored_in,
)
from allstep.comm.places import Place
from allstep.errors import UsageError
from tests.helpers.ports import silent_port


def num_joiners(address: StoreAddress) -> int:
    """How many have asked so far.

    Args:
        address: of the run's store.
    """
    return len(joiners(_opened(address)))


def has_generation(address: StoreAddress, number: int) -> bool:
    """Whether it is written who is in a generation."""
    return Generation.read(_opened(address), number) is not None


def ask_to_stop(address: StoreAddress, signal_number: int) -> None:
    """As a launcher asks all workers whose own have ended."""
    _opened(address).set("stop", str(signal_number))


def asks_to_stop(address: StoreAddress) -> bool:
    """Whether the launcher asks all workers to stop."""
    return signal_to_stop(_opened(address)) is not None


def answers(address: str) -> bool:
    """Whether a store does, at HOST:PORT."""
    with suppress(UsageError):
        return bool(read_address(address))
    return False


def ask_and_end(address: StoreAddress) -> None:
    """As a worker of another host that is lost as it waits, and its launcher, do."""
    place = Place("another host", 7, "another boot")
    ask_to_join(_opened(address), Member("lost", place))
    note_ended(_served(address), address.job_id, place)


@contextmanager
def unreachable_store(host: str, *, is_apart: bool) -> Iterator[StoreRecord]:
    """What a run's folder has of a store at which nothing answers."""
    with silent_port() as port:
        yield StoreRecord(
            port=port,
            job_id="job",
            min_workers=1,
            host=host,
            addresses=["127.0.0.1"],
            is_apart=is_apart,
        )


@lru_cache(maxsize=4)
def _served(address: StoreAddress) -> Store:
    """Once: after some fifty clients that come and go a TCPStore serves nobody for five seconds."""
    return TCPStore(address.host, address.port)


def _opened(address: StoreAddress) -> Store:
    return stored_in(_served(address), address.job_id)
