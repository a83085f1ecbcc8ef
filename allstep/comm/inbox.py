"""Receives in the background, in the order of the calls."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from allstep.comm.missing import RankNames
from allstep.comm.work import ThreadWork, Work

T = TypeVar("T")


class Inbox:
    """Lets asynchronous receives make progress while their caller does other things.

    A tensor's size comes in a header, so its room can only be made when that has arrived. A
    thread waits for it: two ranks that both send and receive asynchronously, and wait in any
    order, would block each other otherwise.

    Args:
        names: what errors call the ranks.
    """

    def __init__(self, names: RankNames) -> None:
        self._names = names
        self._last: dict[tuple[int, int], ThreadWork[Any]] = {}  # under way, by source and tag
        self._lock = threading.Lock()

    def receive(self, source: int, tag: int, receive: Callable[[], T]) -> T:
        """Runs `receive` now, after all that were started for the same source and tag."""
        previous = self._last.get((source, tag))
        if previous is not None:
            previous.join()
        return receive()

    def start(self, source: int, tag: int, receive: Callable[[], T]) -> Work[T]:
        """Runs `receive` in a thread, after all that were started for the same source and tag."""

        def run() -> T:
            try:
                if previous is not None:
                    previous.join()
                return receive()
            finally:  # lets go of a result, which may be large, and of tags that are used once
                with self._lock:
                    if self._last.get((source, tag)) is work:
                        del self._last[source, tag]

        with self._lock:
            previous = self._last.get((source, tag))
            name = f"`recv` from {self._names.named(source)} (tag {tag})"
            work = self._last[source, tag] = ThreadWork.start(run, name)
        return work
