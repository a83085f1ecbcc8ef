"""A command that cleans up after itself when Ctrl-C or SIGTERM comes."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM came."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Calls a handler on SIGINT and SIGTERM; those of before come back at the end."""
    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets a signal unwind what runs inside, by an `Interrupted`; once, for it may clean up long.

    `main` returns 128 + the signal's number then.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    with signals_handled(leave):
        yield
