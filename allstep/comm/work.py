"""`Work`, the handle of every asynchronous call, and its kinds."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist

from allstep.device import Event, current_stream
from allstep.errors import CollectiveTimeoutError, UsageError, check_positive

_LONGEST_S = 1e9
END_S = 2.0  # how long closing a group waits for its calls; see `group_wire`
_AT_EXIT_S = 10.0
_MOMENT_S = 0.005
_LOOK_S = 1.0  # time between two checks that awaited ranks are still there
_awaited_at_exit = WeakSet[threading.Thread]()

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
X = TypeVar("X")


class Work(Protocol[T_co]):
    """A pending call; `wait` returns its result."""

    def wait(self, timeout_s: float | None = None) -> T_co:
        """Waits until the call has ended; may be called again for the same result.

        On an accelerator only the current stream waits, not the host.

        Args:
            timeout_s: longest time to wait; the communicator's `timeout_s` if None.

        Raises:
            CollectiveTimeoutError: if the call took longer.
            PeerLostError: if another worker failed meanwhile.
            UsageError: if `timeout_s` is not positive.
        """

    def is_completed(self) -> bool:
        """Whether `wait` would return at once, with a result or an error."""


class CompletedWork(Generic[T]):
    """A call that has ended already.

    >>> CompletedWork(3).wait()
    3
    """

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self, timeout_s: float | None = None) -> T:
        """Returns the result."""
        return self._result

    def is_completed(self) -> bool:
        """True."""
        return True


class JoinedWork(Generic[T]):
    """Several Works as one, with a function that is called once all of them have ended.

    Args:
        works: the Works, waited for in this order.
        finish: called once, by the first to wait; its result is this Work's result.

    >>> JoinedWork([CompletedWork(1), CompletedWork(2)], lambda: 3).wait()
    3
    """

    def __init__(self, works: Iterable[Work[Any]], finish: Callable[[], T]) -> None:
        self._works = deque(works)
        self._finish: Callable[[], T] | None = finish
        self._finishing = threading.Lock()
        self._result: T | None = None

    def wait(self, timeout_s: float | None = None) -> T:
        """Waits for the Works, for at most `timeout_s` each; may be called by several threads."""
        _check(timeout_s)
        for work in tuple(self._works):
            work.wait(timeout_s)
            _take_off(work, self._works)
        with self._finishing:
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
        return self._result  # type: ignore[return-value]

    def is_completed(self) -> bool:
        """Whether all the Works have ended."""
        return all(work.is_completed() for work in self._works)


class ThreadWork(Generic[T]):
    """A call that a thread makes. After a timeout, `wait` may be called again.

    Args:
        call: the function that `run` calls in the thread.
        name: name of the call, for errors.

    >>> ThreadWork.start(lambda: 3, "three").wait()
    3
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call: Callable[[], T] | None = call
        self._name = name
        self._future: futures.Future[T] = futures.Future()

    @classmethod
    def start(cls, call: Callable[[], T], name: str) -> "ThreadWork[T]":
        """Makes the call in a new thread, for which the process waits some seconds before it ends.

        Otherwise a call of torch's that returns while the interpreter ends would abort the process.
        """
        work = cls(call, name)
        thread = threading.Thread(target=work.run, daemon=True, name=name)
        _awaited_at_exit.add(thread)
        thread.start()
        return work

    def run(self, earlier_error: BaseException | None = None) -> BaseException | None:
        """Makes the call in the current thread, and keeps its result or error.

        Args:
            earlier_error: an error with which the Work fails at once, without the call.

        Returns:
            The error, if there was one.
        """
        call, self._call = self._call, None  # it may hold much memory, and `self` may live long
        assert call is not None
        error = earlier_error
        if error is None:
            try:
                self._future.set_result(call())
            except BaseException as own_error:
                error = own_error
        if error is not None:
            self._future.set_exception(error)
        return error

    def wait(self, timeout_s: float | None = None, check: Callable[[], None] | None = None) -> T:
        """Waits for the call; without `timeout_s` for as long as it takes.

        Args:
            timeout_s: longest time to wait.
            check: called from time to time meanwhile; raises if waiting is pointless.
        """
        _check(timeout_s)
        deadline_s = _deadline_s(timeout_s)
        if check is not None:
            while deadline_s - time.monotonic() > _LOOK_S:
                if futures.wait([self._future], _LOOK_S).done:
                    break
                check()
        left_s = None if timeout_s is None else max(0.0, deadline_s - time.monotonic())
        if left_s is not None and not futures.wait([self._future], left_s).done:
            raise CollectiveTimeoutError(
                f"{self._name} did not finish within {timeout_s:g} s; it goes on: wait again, or "
                "look at what the other rank does."
            )
        return self._future.result()

    def join(self) -> None:
        """Waits for the end of the call, without raising its error."""
        self._future.exception()

    def is_completed(self) -> bool:
        """Whether the call has ended."""
        return self._future.done()


def answer_of_store(call: Callable[[], T]) -> T | None:
    """The result of a store's call; None if the store does not answer within a second.

    A thread makes the call, because it may hang if the store's server has failed.

    Args:
        call: the call of the store.
    """
    with suppress(RuntimeError):
        return ThreadWork.start(call, "a store").wait(_LOOK_S)
    return None


class BackendWork:
    """Calls that one of torch's process groups executes.

    Gloo closes all its connections when a wait for a message times out. So a wait for a message
    that is shorter than `message_timeout_s` waits for a thread, which continues. NCCL aborts a
    call, and soon the process, when a wait for it times out. So a limited wait for an accelerator
    polls the call.

    Args:
        works: the group's Works, in the order in which they were started.
        explained: context manager that turns the group's errors into allstep's; takes the longest
            time of the wait.
        name: name of the calls, for errors.
        on_end: called when all of them have ended.
        message_timeout_s: timeout of messages between CPU ranks; None for calls that end after the
            timeout of their own options.
        polls: whether to poll the calls, as for an accelerator's backend.
        check: called from time to time during a wait; raises if waiting is pointless. Then a thread
            waits for messages.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        explained: Callable[[float | None], AbstractContextManager[None]],
        name: str,
        on_end: Callable[[], None] | None = None,
        message_timeout_s: float | None = None,
        *,
        polls: bool = False,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._works = deque(works)
        self._explained = explained
        self._name = name
        self._on_end = on_end
        self._message_timeout_s = message_timeout_s
        self._polls = polls
        self._check = check
        self._thread: ThreadWork[None] | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the calls; without `timeout_s` until the group's timeout."""
        _check(timeout_s)
        limit_s = self._message_timeout_s
        if limit_s is None:
            self._finish(timeout_s)
        elif self._thread is None and not self._check and (timeout_s or limit_s) >= limit_s:
            self._finish(timeout_s or limit_s)
        else:
            self._in_thread(limit_s).wait(timeout_s, self._check and self._explained_check)

    def is_completed(self) -> bool:
        """Whether the group has ended the calls."""
        if self._message_timeout_s is not None:  # a message counts as ended only after a wait
            return not self._works or self._in_thread(self._message_timeout_s).is_completed()
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether no call is pending any more, as far as is known without waiting."""
        # Another thread may be waiting at the same time, and remove Works that have ended.
        return all(work.is_completed() for work in list(self._works))

    def wait_quietly(self, deadline_s: float) -> bool:
        """Waits until the calls have ended, without raising errors; whether they ended in time.

        Args:
            deadline_s: deadline by `time.monotonic()`.
        """
        for work in list(self._works):
            if self._message_timeout_s is not None:  # polling can't tell their end, only a wait
                left_s = max(deadline_s - time.monotonic(), _MOMENT_S)
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=left_s))
            while not work.is_completed():
                if time.monotonic() >= deadline_s:
                    return False
                time.sleep(_MOMENT_S)
        return True

    def future(self) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
        """A future that the group completes when the calls end; request it before any wait."""
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def _in_thread(self, limit_s: float) -> ThreadWork[None]:
        if self._thread is None:
            self._thread = ThreadWork.start(lambda: self._finish(limit_s), self._name)
        return self._thread

    def _explained_check(self) -> None:
        assert self._check is not None
        with self._explained(None):
            self._check()

    def _finish(self, timeout_s: float | None) -> None:
        with self._explained(timeout_s):
            if self._polls and timeout_s is not None:
                if not self.wait_quietly(time.monotonic() + timeout_s):
                    raise RuntimeError("the device's call timed out")
                timeout_s = None
            for work in tuple(self._works):
                self._finish_one(work, timeout_s)
                _take_off(work, self._works)
        if self._on_end is not None:
            self._on_end()

    def _finish_one(self, work: dist.Work, timeout_s: float | None) -> None:
        deadline_s = _deadline_s(timeout_s)
        if self._check is not None and self._message_timeout_s is None:
            while deadline_s - time.monotonic() > _LOOK_S:
                start_s = time.monotonic()
                try:
                    work.wait(timedelta(seconds=_LOOK_S))
                    return  # some kinds of Work never say that they are completed
                except RuntimeError:
                    if time.monotonic() < start_s + _LOOK_S / 2:  # the call's own error
                        raise
                if not work.is_completed():
                    self._check()
        if timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(_MOMENT_S, deadline_s - time.monotonic())))


class StreamWork:
    """The work of an accelerator's stream up to an event.

    Args:
        event: the event, recorded in that stream.
        device: the device whose current stream waits for it.
    """

    def __init__(self, event: Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self, timeout_s: float | None = None) -> None:
        """Makes the current stream wait."""
        current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        """Whether the device has reached the event."""
        return self._event.query()


def _take_off(work: X, works: deque[X]) -> None:
    """Removes a Work that has ended, unless another waiting thread already has."""
    with suppress(ValueError):
        works.remove(work)


def _check(timeout_s: float | None) -> None:
    if timeout_s is not None:
        check_timeout(timeout_s, "pass seconds, or None")


def check_timeout(timeout_s: float, cure: str = "pass seconds") -> None:
    """Raises UsageError if a value is not a valid timeout.

    A timeout above 292 years, which torch's clocks can't represent, would expire at once.
    """
    check_positive("timeout_s", timeout_s, cure)
    if timeout_s > _LONGEST_S:
        raise UsageError(
            f"`timeout_s` (={timeout_s!r}) must be at most {_LONGEST_S:g}, some 30 years; {cure}."
        )


def _deadline_s(timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def _wait_at_exit() -> None:
    deadline_s = time.monotonic() + _AT_EXIT_S
    for thread in list(_awaited_at_exit):
        thread.join(max(0.0, deadline_s - time.monotonic()))


finalize(ThreadWork, _wait_at_exit)  # runs after finalizers made later, such as an exchange's
