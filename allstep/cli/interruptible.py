"""A command that cleans up after itself when Ctrl-C or SIGTERM comes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM came."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets a signal unwind what runs inside, by an `Interrupted`; once, for it may clean up long.

    `main` returns 128 + the signal's number then.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for other in previous:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
