"""Ends a worker that makes no progress, or whose launcher is gone."""

import os
import sys
import threading
import time
from collections.abc import Callable
from traceback import StackSummary, extract_stack

__all__ = ["Watchdog"]

_POLL_S = 0.2
_END_S = 10.0


class Watchdog:
    """A thread that ends this process when nothing has happened for too long.

    Args:
        num_events: tells how much has happened.
        timeout_s: longest time in which nothing may happen.
        give_up: called with where the main thread is, before the end.
    """

    def __init__(
        self,
        num_events: Callable[[], int],
        timeout_s: float,
        give_up: Callable[[StackSummary], None],
    ) -> None:
        self._num_events = num_events
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._end_s: float | None = None
        self._main = threading.get_ident()
        self._parent = os.getppid()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins to watch."""
        threading.Thread(target=self._watch, name="allstep verify", daemon=True).start()

    def expect_end(self) -> None:
        """All is written: the script may still tidy up, but not for long."""
        if self._end_s is None:
            self._end_s = time.monotonic() + _END_S

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def _watch(self) -> None:
        code = self._wait_for_end()
        if code is not None:
            os._exit(code)

    def _wait_for_end(self) -> int | None:
        """The exit code to end with; None if nobody needs watching any more."""
        seen, since_s = -1, time.monotonic()
        while not self._stopped.wait(_POLL_S):
            now_s = time.monotonic()
            if os.getppid() != self._parent:
                return 1
            if self._num_events() != seen:
                seen, since_s = self._num_events(), now_s
            if self._end_s is not None:
                if now_s > self._end_s:
                    return 0
            elif now_s - since_s > self._timeout_s:
                self._give_up(extract_stack(sys._current_frames()[self._main]))
                return 1
        return None
