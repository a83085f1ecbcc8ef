"""Who is on the next list of workers, in a store as a launcher serves it."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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


def member(
    served: TCPStore,
    number: int,
    ended: set[int],
    *,
    min_workers: int = 1,
    lets_in: Callable[[int], bool] = lambda progress: True,
) -> Membership:
    """A worker's; number 0 is the first, and the others join."""
    address = "127.0.0.1", served.port
    who: dict[str, Any] = {"min_workers": min_workers, "joins": number > 0}
    launch = Launch("torchrun", 0, 1, 0, 1, 0, 1, *address, "job", **who)
    return Membership(launch, grace_s=20.0, lets_in=lets_in, system=Machine(number, ended))


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


def test_most_advanced_is_rank_0() -> None:
    """It gives those who come its state."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (member(served, number, set()) for number in range(2))
    first.begin(Communicator.single_process())
    joins = ThreadWork.start(lambda: second.next(-1), "second")
    wait_until(lambda: len(joiners(stored_in(served, "job"))) == 1)
    first.next(1)
    joins.wait(timeout_s=20.0)
    comes = ThreadWork.start(lambda: second.next(3), "second")
    first.next(2)
    comes.wait(timeout_s=20.0)
    assert (first.rank, second.rank) == (1, 0)
    first.leave()


def test_worker_that_let_others_in_is_lost() -> None:
    """They have no state yet; who is left is at a place where nobody can begin."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store, ended = stored_in(served, "job"), set[int]()
    first, second, joins = (
        member(served, n, ended, lets_in=lambda step: step % 2 == 0) for n in range(3)
    )
    first.begin(Communicator.single_process())
    waits = ThreadWork.start(lambda: second.next(-1), "second")
    wait_until(lambda: len(joiners(store)) == 1)
    first.next(2)
    waits.wait(timeout_s=20.0)
    waits = ThreadWork.start(lambda: joins.next(-1), "joins")
    wait_until(lambda: len(joiners(store)) == 2)
    behind = ThreadWork.start(lambda: second.next(3), "second")
    first.next(4)
    for work in (waits, behind):
        work.wait(timeout_s=20.0)
    assert len(second.members) == 3
    ended.add(0)
    waits = ThreadWork.start(lambda: joins.next(-1), "joins again")
    second.next(3)
    assert len(second.members) == 1
    wait_until(lambda: len(joiners(store)) == 3)
    second.next(4)
    waits.wait(timeout_s=20.0)
    assert len(second.members) == 2
    first.leave()


def test_nobody_is_left_out_without_whom_too_few_are_left() -> None:
    """All that came in vain may try again together: nobody was lost."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, other = (member(served, number, set(), min_workers=2) for number in range(2))
    first.begin(Communicator.single_process())
    joins = ThreadWork.start(lambda: other.next(-1), "joins")
    wait_until(lambda: len(joiners(stored_in(served, "job"))) == 1)
    first.next(1)
    joins.wait(timeout_s=20.0)
    comes = ThreadWork.start(lambda: other.next(-1), "comes")
    first.next(1)
    comes.wait(timeout_s=20.0)
    assert len(first.members) == len(other.members) == 2
    first.leave()
