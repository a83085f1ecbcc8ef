"""Commands that clean up after Ctrl-C or SIGTERM."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised on Ctrl-C or SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Calls a handler on SIGINT and SIGTERM; restores the earlier handlers at the end."""
    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises `Interrupted` inside at the first signal; further ones do not disturb the clean-up.

    `main` returns 128 + the signal's number then.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    with signals_handled(leave):
        yield
