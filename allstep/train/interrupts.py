"""Ctrl-C and SIGTERM become a request that the loop answers between two steps."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["REPEAT_S", "SIGNALS", "Interrupts"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)

# A terminal, a launcher and a scheduler may each deliver the same request; only a repeat
# that comes later than this is somebody who doesn't want to wait.
REPEAT_S = 2.0


class Interrupts:
    """While entered, SIGINT and SIGTERM set `requested` instead of ending the process.

    A repeat within `REPEAT_S` is ignored; a later one gets the handler that was there
    before, so that a second Ctrl-C ends the process at once. Off the main thread, where
    Python allows no handlers, nothing is installed and `requested` stays None.

    Attributes:
        requested: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._requested_at_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.requested is None:
            self.requested = signal.Signals(number)
            self._requested_at_s = now_s
        elif now_s - self._requested_at_s > REPEAT_S:
            self._insist(signal.Signals(number), frame)

    def _insist(self, number: signal.Signals, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
