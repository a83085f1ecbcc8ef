"""What a worker is doing, noted as it goes."""

import threading
import time
from collections.abc import Callable, Mapping

_NUM_STEPS = 10  # of whose times means are kept


class Activity:
    """What a worker is doing: its phase, and the calls in which its threads wait.

    Attributes:
        phase: of the step, such as "backward".
        step: optimizer steps before this one, None before the first.
        since_s: when the phase began, of `time.monotonic`.
        metrics: the last ones.
        num_total_steps: of the whole run; None if that is not known.
        times_s: how long a step waited for data, computed, and waited for the exchange; means of
            about the last ten steps, zeros before the first one's end.
        straggler: who keeps the others waiting now, and what helps, in words; empty if nobody.
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
        self.num_total_steps: int | None = None
        self.times_s = (0.0, 0.0, 0.0)
        self.straggler = ""
        self.on_end: Callable[[str, str], None] | None = None
        self._calls: dict[int, tuple[str, float]] = {}  # by thread
        self._num_timed = 0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins another phase; of the same step, if none is given."""
        self.phase, self.since_s = phase, time.monotonic()
        if step is not None:
            self.step = step

    def note_times(self, data_s: float, compute_s: float, wait_s: float) -> None:
        """A step has ended; where its time went.

        >>> activity = Activity()
        >>> activity.note_times(0.0, 1.0, 3.0)
        >>> activity.note_times(2.0, 1.0, 0.0)
        >>> activity.times_s
        (1.0, 1.0, 1.5)
        """
        self._num_timed = min(self._num_timed + 1, _NUM_STEPS)
        data, compute, wait = self.times_s
        self.times_s = (
            data + (data_s - data) / self._num_timed,
            compute + (compute_s - compute) / self._num_timed,
            wait + (wait_s - wait) / self._num_timed,
        )

    def call(self, verb: str) -> "Call":
        """Around a wait for other workers; one inside another belongs to it."""
        return Call(self._calls, verb)

    def oldest_call(self) -> tuple[str, float] | None:
        """The wait that has taken longest, and since when; None if nothing waits."""
        return min(list(self._calls.values()), key=lambda call: call[1], default=None)

    def end(self, how: str, message: str = "") -> None:
        """Says how this worker ends, where a file is kept."""
        if self.on_end is not None:
            self.on_end(how, message)


class Call:
    """A context noted in a dict of calls by thread; a class, as there are many of them in a step.

    Args:
        calls: thread -> the outermost call in which it waits, and since when.
        verb: of the call.
    """

    __slots__ = ("_calls", "_thread", "_verb")

    def __init__(self, calls: dict[int, tuple[str, float]], verb: str) -> None:
        self._calls, self._verb = calls, verb
        self._thread: int | None = None  # where this is the outermost one

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if thread not in self._calls:
            self._calls[thread] = self._verb, time.monotonic()
            self._thread = thread

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._calls.pop(self._thread, None)
