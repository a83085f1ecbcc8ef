"""A file in which a worker records what it is doing, to find out later why a run ended.

[Note: last state] `RUN/last_state/rank-N.txt` begins with a record of a fixed size, one line of
JSON, which a thread rewrites twice a second: so the worker's last state is known while it runs, and
after it was stopped, killed or lost, and a step only has to record in memory its phase and where
its time went. The record is followed by the stacks of all threads if the worker fails or gets a
fatal signal, for which Python's faulthandler holds the file open. Space for both is allocated at
the start, in case the disk is full later. The same thread logs which worker this one waits for,
once the wait takes seconds.
"""

import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from allstep.comm.activity import Activity
from allstep.comm.places import Place
from allstep.comm.worker_state import (
    EXITED,
    FAILED,
    LOST_PEER,
    RECORD_BYTES,
    SIGNALLED,
    TIMED_OUT,
    WELL,
    WorkerState,
    read_state,
    read_states,
    record_of,
    state_folder,
    waiting_words,
)
from allstep.errors import CollectiveTimeoutError, CommunicationError, DisagreementError

_ROOM_BYTES = 32768
_BEAT_S = 0.5
_NOTICE_S = 5.0
_logger = logging.getLogger(__name__)


class LastState:
    """Keeps a worker's file up to date, from `start` to `end`. See [Note: last state].

    A context manager, to be entered after `start`: it records how its block ends.

    If the file can't be written, there is none: a diagnosis must not make a run fail.

    Args:
        run_dir: the run's folder; made if missing.
        activity: what the worker is doing.
        number, size: its rank, and the number of workers; -1 and 0 for a worker that has no rank
            yet, whose file begins with `move`.
        placed: rank -> the rank and where it runs, for messages.
        notice_s: seconds of waiting for others after which to log it; then doubled each time.
    """

    def __init__(
        self,
        run_dir: Path | str,
        activity: Activity,
        number: int,
        size: int,
        placed: Callable[[int], str],
        *,
        notice_s: float = _NOTICE_S,
    ) -> None:
        self._run_dir, self._activity, self._placed = Path(run_dir), activity, placed
        place = Place.own()
        self._own = WorkerState(
            rank=number,
            size=size,
            host=place.host,
            pid=place.pid,
            space=place.space,
            born=place.born,
            start_s=time.time(),
            metrics={},
        )
        self._notice_s = notice_s
        self._lock = threading.RLock()  # a signal handler may call `end` while its thread writes
        self._stopped = threading.Event()
        self._fd: int | None = None
        self._has_faults = False

    def start(self) -> Self:
        """Creates the file and starts its thread."""
        if self._own.size:
            self._open()
        self._activity.on_end = self.end
        atexit.register(self._end_at_exit)
        threading.Thread(target=self._watch, name="allstep last state", daemon=True).start()
        return self

    def move(self, number: int, size: int, placed: Callable[[int], str]) -> None:
        """Continues in the file of another rank; for the arguments see the class.

        The worker that had that rank has moved, too, or is gone.
        """
        with self._lock:
            if self._stopped.is_set():
                return
            self._close()
            self._own, self._placed = replace(self._own, rank=number, size=size), placed
            self._open()

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            folder = state_folder(self._run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.glob("rank-*.txt"):  # left from when there were more workers
                if (left := read_state(file)) is not None and left.rank >= self._own.size:
                    file.unlink(missing_ok=True)
            file = folder / f"rank-{self._own.rank}.txt"
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.write(self._fd, bytes(_ROOM_BYTES))
            os.lseek(self._fd, RECORD_BYTES, os.SEEK_SET)
        self._write()
        if self._fd is not None and not faulthandler.is_enabled():  # else the user enabled it
            faulthandler.enable(self._fd)
            self._has_faults = True

    def _close(self) -> None:
        if self._has_faults:
            faulthandler.disable()
            self._has_faults = False
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def end(self, how: str, message: str = "", trace: str = "") -> None:
        """Records how the worker ends and closes the file; only the first call has an effect.

        Args:
            how: WELL, EXITED, FAILED or another such constant of `worker_state`.
            message: the error's message.
            trace: the error's traceback; unless all is well, all threads' stacks follow it.
        """
        with self._lock:
            if self._stopped.is_set() or os.getpid() != self._own.pid:  # or in a forked child
                return
            self._stopped.set()
            self._own = replace(self._own, end=how, message=message)
            self._write()
            if self._fd is not None and how not in (WELL, EXITED):
                with contextlib.suppress(OSError):
                    os.write(self._fd, trace.encode(errors="replace")[-_ROOM_BYTES // 4 :])
                    faulthandler.dump_traceback(self._fd)
            self._close()
        self._activity.on_end = None
        atexit.unregister(self._end_at_exit)

    def fail(self, error: BaseException) -> None:
        """Records that the worker ends with an error."""
        if isinstance(error, KeyboardInterrupt):
            self.end(SIGNALLED, signal.SIGINT.name)
            return
        how = FAILED
        if isinstance(error, CommunicationError) and not isinstance(error, DisagreementError):
            how = TIMED_OUT if isinstance(error, CollectiveTimeoutError) else LOST_PEER
        self.end(
            how, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is None:
            self.end(WELL)
        else:
            self.fail(error)

    def _end_at_exit(self) -> None:
        """Records the end of a script that did not close its communicator, maybe after an error."""
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is None:
            self.end(EXITED)
        else:
            self.fail(error)

    def _watch(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            self._write()
            self._notice()

    def _write(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # such as a full disk or a lost mount
            if self._fd is not None:
                os.pwrite(self._fd, record_of(self._now()), 0)

    def _now(self) -> WorkerState:
        doing, now_s = self._activity, time.monotonic()
        call = doing.oldest_call()
        data_s, compute_s, wait_s = doing.times_s
        return replace(
            self._own,
            seen_s=time.time(),
            seen_monotonic_s=now_s,
            phase=doing.phase,
            phase_s=now_s - doing.since_s,
            step=doing.step,
            call=None if call is None else call[0],
            call_s=0.0 if call is None else now_s - call[1],
            rss_bytes=_rss_bytes(),
            metrics=doing.metrics,
            num_total_steps=doing.num_total_steps,
            data_s=data_s,
            compute_s=compute_s,
            wait_s=wait_s,
            straggler=doing.straggler,
        )

    def _notice(self) -> None:
        """Logs which ranks this worker has long waited for; only the first waiting rank does so."""
        call = self._activity.oldest_call()
        if call is None or time.monotonic() - call[1] < self._notice_s:
            return
        waited_s, self._notice_s = self._notice_s, 2 * self._notice_s
        own = self._own.rank
        states = {state.rank: state for state in read_states(self._run_dir) if state.end is None}
        if any(state.waits for rank, state in states.items() if rank < own):
            return
        others = [rank for rank in range(self._own.size) if rank != own]
        words = waiting_words(waited_s, others, states, self._placed)
        if words:
            _logger.warning(words)


def _rss_bytes() -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
