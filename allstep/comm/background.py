"""Calls in a thread, whose caller may stop waiting and come back later."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from allstep.errors import CollectiveTimeoutError

__all__ = ["in_thread", "result_of"]

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Starts a call in a thread of that name.

    >>> in_thread(lambda: 3, "three").result()
    3
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future


def result_of(future: Future[T], what: str, timeout_s: float | None) -> T:
    """Waits for a call; one that takes longer goes on.

    Args:
        future: of the call.
        what: names the call in errors.
        timeout_s: how long to wait; None for as long as the call takes.

    Raises:
        CollectiveTimeoutError: if it takes longer.
    """
    try:
        return future.result(timeout_s)
    except TimeoutError as error:
        raise CollectiveTimeoutError(
            f"{what} did not finish within {timeout_s:g} s; it goes on: wait again, or look at "
            "what the other rank does."
        ) from error
