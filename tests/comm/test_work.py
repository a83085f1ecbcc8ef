"""The kinds of `Work`: results, errors and time limits."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import pytest

from allstep.comm.inbox import Inbox
from allstep.comm.missing import RankNames
from allstep.comm.work import BackendWork, CompletedWork, JoinedWork, ThreadWork
from allstep.errors import CollectiveTimeoutError, UsageError


def test_joined_work_finishes_once_and_gives_its_result_again():
    calls: list[int] = []
    work = JoinedWork([CompletedWork(1), CompletedWork(2)], lambda: calls.append(1) or len(calls))
    assert work.is_completed()
    assert [work.wait(3), work.wait()] == [1, 1]
    assert calls == [1]


class Meets(CompletedWork[None]):
    """Ends once two threads wait for it."""

    def __init__(self) -> None:
        super().__init__(None)
        self._barrier = threading.Barrier(2, timeout=10)

    def wait(self, timeout_s: float | None = None) -> None:
        self._barrier.wait()


def test_joined_work_of_several_threads_that_wait():
    """Each waits for all that it joins, whoever is first."""
    calls: list[int] = []
    work = JoinedWork([Meets(), Meets()], lambda: calls.append(1) or len(calls))
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(work.wait) for _ in range(2)]
        assert [future.result() for future in found] == [1, 1]
    assert calls == [1]


def test_joined_work_goes_on_where_a_wait_ran_out_of_time():
    go = threading.Event()
    first, second = CompletedWork(None), ThreadWork.start(lambda: go.wait(20), "second")
    work = JoinedWork([first, second], lambda: "all")
    with pytest.raises(CollectiveTimeoutError, match=r"second did not finish within 0.01 s"):
        work.wait(0.01)
    assert not work.is_completed()
    go.set()
    assert work.wait(20) == "all"


def test_thread_work_gives_its_error_to_everyone_who_waits():
    work = ThreadWork.start(lambda: 1 / 0, "division")
    work.join()
    assert work.is_completed()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait(1)


def test_thread_work_makes_no_call_after_an_earlier_error():
    calls: list[int] = []
    work = ThreadWork(lambda: calls.append(1), "call")
    earlier = ValueError("earlier")
    assert work.run(earlier) is earlier
    with pytest.raises(ValueError, match="earlier"):
        work.wait()
    assert not calls


@pytest.mark.parametrize(
    "work", [JoinedWork([], lambda: None), ThreadWork.start(lambda: None, "nothing")]
)
@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), 1e10])
def test_wait_refuses_a_timeout_that_is_no_time(work, timeout_s):
    with pytest.raises(UsageError, match=r"`timeout_s` \(=.*\) must be (above 0|at most 1e\+09)"):
        work.wait(timeout_s)


class DeviceCall:
    """A call of a backend that gives it up when a wait for it runs out of time."""

    def __init__(self) -> None:
        self.has_ended = False

    def is_completed(self) -> bool:
        return self.has_ended

    def wait(self, timeout: timedelta | None = None) -> None:
        assert timeout is None, "the call is given up"


def test_a_call_of_a_device_goes_on_where_a_wait_ran_out_of_time() -> None:
    call = DeviceCall()
    work = BackendWork([call], lambda _: nullcontext(), "call", polls=True)  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(0.01)
    assert not work.is_completed()
    call.has_ended = True
    work.wait(20.0)
    assert work.is_completed()


class WaitedForMeanwhile:
    """A call that another thread waits for while somebody looks whether it has ended."""

    def __init__(self) -> None:
        self.look: Callable[[], None] = lambda: None

    def is_completed(self) -> bool:
        self.look()
        return True

    def wait(self, timeout: timedelta | None = None) -> None:
        pass


def test_calls_that_end_while_somebody_looks_at_them() -> None:
    calls = [WaitedForMeanwhile() for _ in range(3)]
    work = BackendWork(calls, lambda _: nullcontext(), "call")  # type: ignore[arg-type]
    calls[0].look = lambda: work.wait(20.0)
    assert work.has_ended


@pytest.mark.parametrize("has_tags", [True, False])
def test_messages_without_tags_are_received_in_the_order_of_the_calls(has_tags: bool) -> None:
    inbox, go = Inbox(RankNames(range(2), 0, 2), has_tags=has_tags), threading.Event()
    order: list[int] = []
    first = inbox.start(1, 5, lambda: go.wait(20) and order.append(5))
    second = inbox.start(1, 6, lambda: order.append(6))
    if has_tags:
        second.wait(20)
    go.set()
    for work in (first, second):
        work.wait(20)
    assert order == ([6, 5] if has_tags else [5, 6])
