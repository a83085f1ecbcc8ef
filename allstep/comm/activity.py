"""What a worker is doing, noted as it goes."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Activity:
    """What a worker is doing: its phase, and the calls in which its threads wait.

    Attributes:
        phase: of the step, such as "backward".
        step: optimizer steps before this one, None before the first.
        since_s: when the phase began, of `time.monotonic`.
        metrics: the last ones.
        on_end: told how this worker ends, and with which error; None if no file is kept.

    >>> activity = Activity()
    >>> activity.enter("backward", 3)
    >>> with activity.call("all_reduce"):
    ...     activity.phase, activity.step, activity.oldest_call()[0]
    ('backward', 3, 'all_reduce')
    """

    def __init__(self) -> None:
        self.phase = "start"
        self.step: int | None = None
        self.since_s = time.monotonic()
        self.metrics: Mapping[str, float] = {}
        self.on_end: Callable[[str, str], None] | None = None
        self._calls: dict[int, tuple[str, float]] = {}  # by thread

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins another phase; of the same step, if none is given."""
        self.phase, self.since_s = phase, time.monotonic()
        if step is not None:
            self.step = step

    @contextmanager
    def call(self, verb: str) -> Iterator[None]:
        """Around a wait for other workers; one inside another belongs to it."""
        thread = threading.get_ident()
        if thread in self._calls:
            yield
            return
        self._calls[thread] = verb, time.monotonic()
        try:
            yield
        finally:
            self._calls.pop(thread, None)

    def oldest_call(self) -> tuple[str, float] | None:
        """The wait that has taken longest, and since when; None if nothing waits."""
        return min(list(self._calls.values()), key=lambda call: call[1], default=None)

    def end(self, how: str, message: str = "") -> None:
        """Says how this worker ends, where a file is kept."""
        if self.on_end is not None:
            self.on_end(how, message)
