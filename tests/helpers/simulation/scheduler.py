"""Threads of simulated processes, of which one runs at a time, and a clock that only they move."""

import math
import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

_SLOW = ((0.01, 0.5), (0.05, 0.05))  # how often a call takes long, and how long at most


class KilledError(BaseException):
    """Unwinds the threads of a process that was killed; no code catches it by mistake."""


class StuckError(AssertionError):
    """Threads wait for what will not come, or for longer than anything may take."""


@dataclass
class Process:
    """A simulated process.

    Attributes:
        number: unlike any other's.
        host: processes of one host know of each other's end.
        num_calls: of what may be disturbed, since `is_armed`.
        is_armed: whether faults may happen to it yet.
        dies_at, freezes_at: at which of its calls it is killed, or stopped for a while.
        freezes_for_s: how long it is stopped.
    """

    number: int
    host: int = 0
    dies_at: float = math.inf
    freezes_at: float = math.inf
    freezes_for_s: float = 0.0
    is_armed: bool = False
    num_calls: int = 0
    has_ended: bool = False
    was_killed: bool = False
    frozen_until_s: float = -1.0
    on_end: list[Callable[[], None]] = field(default_factory=list)


class _Task:
    def __init__(self, process: Process, name: str) -> None:
        self.process, self.name = process, name
        self.resumed = _held_lock()
        self.is_ready: Callable[[], bool] | None = None
        self.until_s = math.inf
        self.has_ended = False
        self.thread: threading.Thread | None = None

    def can_run(self, now_s: float) -> bool:
        process = self.process
        if process.has_ended:
            return True
        if process.frozen_until_s > now_s:
            return False
        return now_s >= self.until_s or self.is_ready is None or self.is_ready()

    def next_s(self, now_s: float) -> float:
        """When it may go on by itself."""
        if self.process.frozen_until_s > now_s:
            return self.process.frozen_until_s
        return self.until_s


class Scheduler:
    """Decides by its seed which thread goes on.

    Args:
        seed: of the order.
        most_s: of the simulated clock; what takes longer is stuck.

    Attributes:
        random: of everything that the simulation draws.
        now_s: the simulated time.
        num_changes: of what somebody may look at again and again.
        arrivals_s: when messages on their way will be there.
    """

    def __init__(self, seed: int, most_s: float = 1000.0) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.num_changes = 0
        self.arrivals_s: list[float] = []
        self._most_s = most_s
        self._tasks: list[_Task] = []
        self._current: _Task | None = None
        self._is_over = False
        self._stuck: StuckError | None = None
        self._done = _held_lock()

    @property
    def process(self) -> Process:
        """Whose thread runs."""
        assert self._current is not None
        return self._current.process

    def start(self, process: Process, run: Callable[[], None], name: str) -> None:
        """Another thread of a process."""
        task = _Task(process, name)

        def work() -> None:
            task.resumed.acquire()
            try:
                self._check_alive(task)
                run()
            except KilledError:
                pass
            finally:
                task.has_ended = True
                self._tasks.remove(task)
                self._hand_over()

        task.thread = threading.Thread(target=work, name=name, daemon=True)
        self._tasks.append(task)
        task.thread.start()

    def run(self) -> None:
        """Runs until all threads have ended.

        Raises:
            StuckError: if they don't.
        """
        self._hand_over()
        self._done.acquire()
        if self._stuck is not None:
            raise self._stuck

    def sleep(self, duration_s: float) -> None:
        """Waits for so long."""
        self.pause(_never, duration_s)

    def sleep_until_change(self, most_s: float) -> None:
        """Waits until there is something new to look at, or for so long."""
        num_changes = self.num_changes
        self.pause(lambda: self.num_changes > num_changes, most_s)

    def end(self, process: Process, *, killed: bool) -> None:
        """No thread of it goes on; others may notice."""
        if process.has_ended:
            return
        process.has_ended, process.was_killed = True, killed
        self.num_changes += 1
        for told in process.on_end:
            told()

    def pause(
        self, is_ready: Callable[[], bool] | None = None, timeout_s: float = math.inf
    ) -> bool:
        """A call to the outside: others may go on meanwhile, and this process may be lost.

        Args:
            is_ready: what the thread waits for.
            timeout_s: how long it waits at most.

        Returns:
            Whether it is.
        """
        task = self._current
        assert task is not None and task.thread is threading.current_thread()
        self._check_alive(task)
        self._disturb(task.process)
        task.is_ready, task.until_s = is_ready, self.now_s + timeout_s
        if is_ready is None:
            task.is_ready, task.until_s = _never, self.now_s + self._draw_delay_s()
        self._hand_over(task)
        self._check_alive(task)
        return is_ready is None or is_ready()

    def _draw_delay_s(self) -> float:
        draw = self.random.random()
        for share, most_s in _SLOW:
            if draw < share:
                return self.random.random() * most_s
        return 0.0

    def _disturb(self, process: Process) -> None:
        if not process.is_armed:
            return
        process.num_calls += 1
        if process.num_calls >= process.dies_at:
            self.end(process, killed=True)
            raise KilledError
        if process.num_calls == process.freezes_at:
            process.frozen_until_s = self.now_s + process.freezes_for_s

    def _check_alive(self, task: _Task) -> None:
        if self._is_over or task.process.has_ended:
            raise KilledError

    def _hand_over(self, task: _Task | None = None) -> None:
        """Lets another thread go on, or this one; returns when it is its turn again."""
        chosen = self._choose()
        if chosen is None:
            self._done.release()
            return
        self._current = chosen
        if chosen is not task:
            chosen.resumed.release()
            if task is not None:
                task.resumed.acquire()

    def _choose(self) -> _Task | None:
        if not self._tasks:
            return None
        while not self._is_over:
            can_run = [task for task in self._tasks if task.can_run(self.now_s)]
            if can_run:
                return self.random.choice(can_run)
            self._pass_time()
        return self._tasks[0]

    def _pass_time(self) -> None:
        later = [task.next_s(self.now_s) for task in self._tasks]
        later += self.arrivals_s
        next_s = min((s for s in later if s > self.now_s), default=math.inf)
        if next_s > self._most_s:
            self._stuck = StuckError(f"after {self.now_s:.3f} s:\n{self._stacks()}")
            self._is_over = True
            return
        self.now_s = next_s
        self.arrivals_s = [s for s in self.arrivals_s if s > next_s]

    def _stacks(self) -> str:
        frames = sys._current_frames()
        texts = []
        for task in self._tasks:
            frame = frames.get(task.thread.ident or 0) if task.thread else None
            stack = "".join(traceback.format_stack(frame)[-12:]) if frame else ""
            texts.append(f"process {task.process.number}, {task.name}:\n{stack}")
        return "\n".join(texts)


def _held_lock() -> threading.Lock:
    """One whose release lets a thread go on that waits for it, or comes to it later; once.

    A Semaphore is written in Python, and makes a training take a quarter longer.
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


def _never() -> bool:
    return False
