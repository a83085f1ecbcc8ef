"""Receives in the background, in the order of the calls."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from allstep.comm.pending import Pending
from allstep.errors import CollectiveTimeoutError

__all__ = ["Inbox"]

T = TypeVar("T")


class Inbox(Generic[T]):
    """Lets asynchronous receives make progress while their caller does other things.

    A tensor's size comes in a header, so its room can only be made when that has arrived. A
    thread waits for it: two ranks that both send and receive asynchronously, and wait in any
    order, would block each other otherwise.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], Future[T]] = {}

    def receive(self, source: int, tag: int, receive: Callable[[], T]) -> T:
        """Runs `receive` now, after all that were started for the same source and tag."""
        previous = self._last.pop((source, tag), None)
        if previous is not None:
            previous.exception()  # waits; the error itself belongs to whoever started it
        return receive()

    def start(self, source: int, tag: int, receive: Callable[[], T]) -> Pending[T]:
        """Runs `receive` in a thread, after all that were started for the same source and tag."""
        previous = self._last.get((source, tag))
        future: Future[T] = Future()
        self._last[source, tag] = future

        def run() -> None:
            if previous is not None:
                previous.exception()
            try:
                future.set_result(receive())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True, name=f"recv from {source}").start()

        def finish(timeout_s: float | None) -> T:
            try:
                return future.result(timeout_s)
            except TimeoutError as error:
                raise CollectiveTimeoutError(
                    f"`recv` from rank {source} (tag {tag}) did not finish within {timeout_s:g} s; "
                    "it goes on: wait again, or look at what that rank does."
                ) from error

        return Pending(finish)
