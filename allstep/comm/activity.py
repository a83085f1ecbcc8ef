"""What a worker is doing at the moment."""

import threading
import time
from collections.abc import Callable, Mapping

_NUM_STEPS = 10  # recent steps over which times are averaged


class Activity:
    """What a worker is doing: its phase, and the calls in which its threads wait.

    Attributes:
        phase: phase of the step, such as "backward".
        step: number of optimizer steps before the present one; None before the first.
        since_s: when the phase began, by `time.monotonic`.
        metrics: the latest metrics.
        num_total_steps: number of steps of the whole run; None if unknown.
        times_s: how long a step waited for data, computed, and waited for the exchange: means of
            about the last ten steps; zeros until the first step has ended.
        straggler: a sentence on which worker keeps the others waiting, and what helps; empty if
            none does.
        on_end: called with how this worker ends and the error's message; None if no file is kept.

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
        self._calls: dict[int, tuple[str, float]] = {}  # thread -> verb and start of its call
        self._num_timed = 0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins another phase, of the same step if `step` is not given."""
        self.phase, self.since_s = phase, time.monotonic()
        if step is not None:
            self.step = step

    def note_times(self, data_s: float, compute_s: float, wait_s: float) -> None:
        """Records where the time of a step that has just ended went.

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
        """A context around a wait for other workers; of nested ones only the outermost counts."""
        return Call(self._calls, verb)

    def oldest_call(self) -> tuple[str, float] | None:
        """The wait that has lasted longest, and when it began; None if no thread waits."""
        return min(list(self._calls.values()), key=lambda call: call[1], default=None)

    def end(self, how: str, message: str = "") -> None:
        """Records how this worker ends, if a file is kept."""
        if self.on_end is not None:
            self.on_end(how, message)


class Call:
    """A context recorded in a dict of calls by thread; a class for speed, as a step enters many.

    Args:
        calls: thread -> the outermost call in which it waits, and when that began.
        verb: verb of the call.
    """

    __slots__ = ("_calls", "_thread", "_verb")

    def __init__(self, calls: dict[int, tuple[str, float]], verb: str) -> None:
        self._calls, self._verb = calls, verb
        self._thread: int | None = None  # set only if this is the thread's outermost call

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if thread not in self._calls:
            self._calls[thread] = self._verb, time.monotonic()
            self._thread = thread

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._calls.pop(self._thread, None)
