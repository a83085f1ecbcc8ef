"""Receives in the background, in the order of the calls."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from allstep.comm.background import in_thread, result_of
from allstep.comm.pending import Pending
from allstep.comm.roster import Roster

__all__ = ["Inbox"]

T = TypeVar("T")


class Inbox:
    """Lets asynchronous receives make progress while their caller does other things.

    A tensor's size comes in a header, so its room can only be made when that has arrived. A
    thread waits for it: two ranks that both send and receive asynchronously, and wait in any
    order, would block each other otherwise.

    Args:
        roster: what errors call the ranks.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._last: dict[tuple[int, int], Future[Any]] = {}  # still under way, by source and tag
        self._lock = threading.Lock()

    def receive(self, source: int, tag: int, receive: Callable[[], T]) -> T:
        """Runs `receive` now, after all that were started for the same source and tag."""
        _wait_for(self._last.get((source, tag)))
        return receive()

    def start(self, source: int, tag: int, receive: Callable[[], T]) -> Pending[T]:
        """Runs `receive` in a thread, after all that were started for the same source and tag."""

        def run() -> T:
            _wait_for(previous)
            return receive()

        with self._lock:
            previous = self._last.get((source, tag))
            future = self._last[source, tag] = in_thread(run, f"recv from {source}")
        future.add_done_callback(lambda done: self._forget(source, tag, done))
        what = f"`recv` from {self._roster.named(source)} (tag {tag})"
        return Pending(lambda timeout_s: result_of(future, what, timeout_s))

    def _forget(self, source: int, tag: int, done: Future[Any]) -> None:
        """Lets go of a result, which may be large, and of tags that are used once."""
        with self._lock:
            if self._last.get((source, tag)) is done:
                del self._last[source, tag]


def _wait_for(previous: Future[Any] | None) -> None:
    if previous is not None:
        previous.exception()  # waits; the error itself belongs to whoever started it
