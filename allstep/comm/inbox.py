"""Receives in the background, in the order of the calls."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from allstep.comm.missing import RankNames
from allstep.comm.work import ThreadWork, Work

T = TypeVar("T")


class Inbox:
    """Lets asynchronous receives make progress while their caller does other things.

    A tensor's size comes in a header, so memory for it can only be allocated when that has arrived.
    A thread waits for the header: otherwise two ranks that both send and receive asynchronously,
    and wait in any order, would block each other.

    Args:
        names: names of the ranks, for errors.
        has_tags: whether messages with different tags may arrive in any order.
    """

    def __init__(self, names: RankNames, *, has_tags: bool = True) -> None:
        self._names = names
        self._has_tags = has_tags
        self._last: dict[tuple[int, int], ThreadWork[Any]] = {}  # pending, by source and tag
        self._lock = threading.Lock()

    def receive(self, source: int, tag: int, receive: Callable[[], T]) -> T:
        """Runs `receive` now, after all calls started for the same source and tag."""
        previous = self._last.get(self._key(source, tag))
        if previous is not None:
            previous.join()
        return receive()

    def _key(self, source: int, tag: int) -> tuple[int, int]:
        """A key that is equal for messages that arrive in the order of their calls."""
        return source, tag if self._has_tags else 0

    def start(self, source: int, tag: int, receive: Callable[[], T]) -> Work[T]:
        """Runs `receive` in a thread, after all calls started for the same source and tag."""
        key = self._key(source, tag)

        def run() -> T:
            try:
                if previous is not None:
                    previous.join()
                return receive()
            finally:  # frees the result, which may be large, and tags that are used only once
                with self._lock:
                    if self._last.get(key) is work:
                        del self._last[key]

        with self._lock:
            previous = self._last.get(key)
            name = f"`recv` from {self._names.named(source)} (tag {tag})"
            work = self._last[key] = ThreadWork.start(run, name)
        return work
