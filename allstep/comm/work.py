"""`Work`, the handle of every asynchronous call, and the few kinds of it."""

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
END_S = 2.0  # how long a group that ends waits for its calls, see `group_wire`
_AT_EXIT_S = 10.0
_MOMENT_S = 0.005
_LOOK_S = 1.0  # between two looks whether those that are waited for are still there
_awaited_at_exit = WeakSet[threading.Thread]()

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
X = TypeVar("X")


class Work(Protocol[T_co]):
    """A call that is under way; `wait` gives its result."""

    def wait(self, timeout_s: float | None = None) -> T_co:
        """Waits until the call has ended; may be called again for the same result.

        On an accelerator only the current stream waits, not the host.

        Args:
            timeout_s: how long to wait at most; the communicator's `timeout_s` if None.

        Raises:
            CollectiveTimeoutError: if it took longer.
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
    """Several works as one, and what is to be done once all of them have ended.

    Args:
        works: waited for in this order.
        finish: called once, by whoever waits first; its result is this work's.

    >>> JoinedWork([CompletedWork(1), CompletedWork(2)], lambda: 3).wait()
    3
    """

    def __init__(self, works: Iterable[Work[Any]], finish: Callable[[], T]) -> None:
        self._works = deque(works)
        self._finish: Callable[[], T] | None = finish
        self._finishing = threading.Lock()
        self._result: T | None = None

    def wait(self, timeout_s: float | None = None) -> T:
        """Waits for the works, for at most `timeout_s` each; so may several threads."""
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
        """Whether all the works have ended."""
        return all(work.is_completed() for work in self._works)


class ThreadWork(Generic[T]):
    """A call that a thread makes. Whoever stops waiting for it may come back later.

    Args:
        call: what the thread does by calling `run`.
        name: of the call, for errors.

    >>> ThreadWork.start(lambda: 3, "three").wait()
    3
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call: Callable[[], T] | None = call
        self._name = name
        self._future: futures.Future[T] = futures.Future()

    @classmethod
    def start(cls, call: Callable[[], T], name: str) -> "ThreadWork[T]":
        """Makes the call in a thread of its own, for which the process waits before it ends.

        For some seconds. Without that, a call of torch's that returns while the interpreter ends
        aborts the process.
        """
        work = cls(call, name)
        thread = threading.Thread(target=work.run, daemon=True, name=name)
        _awaited_at_exit.add(thread)
        thread.start()
        return work

    def run(self, earlier_error: BaseException | None = None) -> BaseException | None:
        """Makes the call, in the thread that is here, and keeps what came of it.

        Args:
            earlier_error: fails the work at once, without the call.

        Returns:
            The error, if there was one.
        """
        call, self._call = self._call, None  # it may hold much, and `self` may live long
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
            timeout_s: how long to wait at most.
            check: called now and then meanwhile; raises if it is in vain.
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
        """Waits for the end of the call, whatever comes of it."""
        self._future.exception()

    def is_completed(self) -> bool:
        """Whether the call has ended."""
        return self._future.done()


def answer_of_store(call: Callable[[], T]) -> T | None:
    """What a call of a store gives; None if the store does not answer within a second.

    Its server may be what failed, and asking it may hang: a thread asks.

    Args:
        call: of the store.
    """
    with suppress(RuntimeError):
        return ThreadWork.start(call, "a store").wait(_LOOK_S)
    return None


class BackendWork:
    """Calls that a process group of torch's works on by itself.

    Gloo closes all its connections when a wait for a message runs out of time. So whoever waits
    for a message for less than `message_timeout_s` waits for a thread, which goes on. NCCL gives a
    call up, and soon ends the process, when a wait for it runs out of time. So whoever waits for
    an accelerator for a limited time looks at the call again and again.

    Args:
        works: the group's, in the order in which they were started.
        explained: the context that turns the group's errors into allstep's; takes the time that
            the wait may take.
        name: of the calls, for errors.
        on_end: called when all of them have ended.
        message_timeout_s: of messages between CPU ranks; None for calls that end after the
            timeout of their own options.
        polls: whether to look at the calls instead, as an accelerator's backend makes them.
        check: called now and then while a wait lasts; raises if it is in vain. A wait for messages
            then is a thread's.
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
        """Waits for the calls; without `timeout_s` for as long as the group allows."""
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
        if self._message_timeout_s is not None:  # the group learns of a message's end by a wait
            return not self._works or self._in_thread(self._message_timeout_s).is_completed()
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether nothing is under way any more, as far as is known without a wait."""
        # Another thread may be waiting for them meanwhile, and take off what has ended.
        return all(work.is_completed() for work in list(self._works))

    def outlast(self, deadline_s: float) -> bool:
        """Waits until the calls have ended, whatever comes of them; whether they have in time.

        Args:
            deadline_s: of `time.monotonic()`.
        """
        for work in list(self._works):
            if self._message_timeout_s is not None:  # which no look tells of, and a wait ends
                left_s = max(deadline_s - time.monotonic(), _MOMENT_S)
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=left_s))
            while not work.is_completed():
                if time.monotonic() >= deadline_s:
                    return False
                time.sleep(_MOMENT_S)
        return True

    def future(self) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
        """Completed by the group at the end of the calls; to be asked for before any wait."""
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
                if not self.outlast(time.monotonic() + timeout_s):
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
                    return  # not all kinds of them say that they are completed
                except RuntimeError:
                    if time.monotonic() < start_s + _LOOK_S / 2:  # its own, which came at once
                        raise
                if not work.is_completed():
                    self._check()
        if timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(_MOMENT_S, deadline_s - time.monotonic())))


class StreamWork:
    """What a stream of an accelerator does up to an event.

    Args:
        event: recorded in that stream.
        device: whose current stream waits for it.
    """

    def __init__(self, event: Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self, timeout_s: float | None = None) -> None:
        """Lets the current stream wait."""
        current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        """Whether the device has come to the event."""
        return self._event.query()


def _take_off(work: X, works: deque[X]) -> None:
    """Lets go of what has ended, unless another thread that waits for it has."""
    with suppress(ValueError):
        works.remove(work)


def _check(timeout_s: float | None) -> None:
    if timeout_s is not None:
        check_timeout(timeout_s, "pass seconds, or None")


def check_timeout(timeout_s: float, cure: str = "pass seconds") -> None:
    """Raises UsageError for what is no time to wait.

    What torch's clocks can't count, 292 years, would be over at once.
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


finalize(ThreadWork, _wait_at_exit)  # after those that were made later, as an exchange's
