"""Who is on the next list of workers, in a store as a launcher serves it."""

import time
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import TCPStore

from allstep import Communicator
from allstep.comm.generations import joiners, stored_in
from allstep.comm.membership import Membership
from allstep.comm.places import Place
from allstep.comm.system import System
from allstep.comm.work import ThreadWork
from allstep.env import Launch
from allstep.errors import UsageError


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Machine(System):
    """One on which workers have places, and end, as a test says."""

    def __init__(self, number: int, ended: set[int]) -> None:
        super().__init__("127.0.0.1")
        self._number, self._ended = number, ended

    def own_place(self) -> Place:
        return Place("host", self._number)

    def has_ended(self, place: Place) -> bool:
        return place.pid in self._ended


def member(served: TCPStore, number: int, ended: set[int]) -> Membership:
    """A worker's; number 0 is the first, and the others join."""
    address, joins = ("127.0.0.1", served.port), number > 0
    launch = Launch("torchrun", 0, 1, 0, 1, 0, 1, *address, "job", min_workers=1, joins=joins)
    return Membership(launch, grace_s=20.0, system=Machine(number, ended))


def test_one_is_let_in_at_a_time_also_by_who_has_joined() -> None:
    """Else one that can't connect takes others along again, and they end with it."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = stored_in(served, "job")
    ended = set[int]()
    first, *others = (member(served, number, ended) for number in range(4))
    first.begin(Communicator.single_process())

    def join(membership: Membership) -> None:
        with suppress(UsageError):  # the run has ended
            membership.next(-1)

    works = [ThreadWork.start(lambda m=other: join(m), "joins") for other in others]
    wait_until(lambda: len(joiners(store)) == len(others))
    first.next(1)
    for work in works:
        work.wait(timeout_s=20.0)
    # All come, as if they had not connected.
    works = [ThreadWork.start(lambda m=other: join(m), "joins again") for other in others]
    first.next(1)
    assert len(first.members) == 1
    wait_until(lambda: len(joiners(store)) == 2 * len(others))
    first.next(2)
    assert len(first.members) == 2
    wait_until(lambda: any(other.generation == first.generation for other in others))
    joined = next(other for other in others if other.generation == first.generation)
    ended.add(0)
    joined.next(3)
    assert len(joined.members) == 2
    first.end()
    for work in works:
        work.wait(timeout_s=20.0)
