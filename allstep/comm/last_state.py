"""What a worker is doing, noted as it goes, and left in a file for those who ask why a run ended.

[Note: last state] `RUN/last_state/rank-N.txt` begins with a record of a fixed size, one line of
JSON, which a thread rewrites twice a second: so what was last seen of a worker is known when it is
stopped, killed or lost, and a step costs no more than to note its phase in memory. Behind it come
the stacks of all threads if the worker fails, or gets a fatal signal, for which Python's
faulthandler has the file open. Room for both is taken at the start, in case the disk is full then.
The same thread says for whom this worker waits, once that takes seconds.
"""

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from allstep.comm.places import Place, own_space
from allstep.errors import CollectiveTimeoutError, CommunicationError, DisagreementError

WELL, FAILED, SIGNALLED = "ended well", "failed", "ended by a signal"
TIMED_OUT, LOST_PEER, EXITED = "timed out", "lost another rank", "ended without `close`"

_FOLDER = "last_state"
_RECORD_BYTES, _ROOM_BYTES = 4096, 32768
_MOST_CHARACTERS, _MOST_METRICS = 1500, 8  # of a message; that a record has room for
_BEAT_S = 0.5
_NOTICE_S = 5.0
_SILENT_S = 5.0  # without a record: its host is gone, or it hangs
_logger = logging.getLogger(__name__)


class Activity:
    """What a worker is doing: its phase, and the calls in which its threads wait.

    Attributes:
        phase: of the step, such as "backward".
        step: optimizer steps before this one, None before the first.
        since_s: when the phase began, of `time.monotonic`.
        metrics: the last ones.
        last_state: the file that is kept of it, if one is.

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
        self.last_state: LastState | None = None
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
        if self.last_state is not None:
            self.last_state.end(how, message)


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """What a worker's file says of it.

    Attributes:
        rank, size, host, pid, space: who it is, as in `Place`.
        born: when its process was started, in the system's own count.
        seen_s: when this was written, in seconds since 1970.
        phase, phase_s, step: what it was doing, for how long, in which step.
        call, call_s: what it waited in, and for how long; None if it did not wait.
        rss_bytes: resident memory.
        metrics: the last ones.
        end, message: how it ended and with which error; None while it has not.
        stacks: of its threads; empty while it has left none.
    """

    rank: int
    size: int
    host: str
    pid: int
    space: str = ""
    born: str = ""
    seen_s: float = 0.0
    phase: str = "start"
    phase_s: float = 0.0
    step: int | None = None
    call: str | None = None
    call_s: float = 0.0
    rss_bytes: int = 0
    metrics: Mapping[str, float | None]
    end: str | None = None
    message: str = ""
    stacks: str = ""

    @property
    def where(self) -> str:
        """What it was last seen in.

        >>> WorkerState(rank=0, size=1, host="a", pid=7, phase="data", step=3, metrics={}).where
        'data of step 3'
        """
        return self.phase if self.step is None else f"{self.phase} of step {self.step}"

    @property
    def process(self) -> str:
        """The kernel's letter for its process, "" if that is gone, "?" on another host."""
        if not self.space or self.space != own_space():
            return "?"
        letter, born = _stat(self.pid)
        return letter if born == self.born and letter not in ("Z", "X") else ""

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel says so; only this host's does."""
        return self.process in ("T", "t")

    @property
    def waits(self) -> bool:
        """Whether it waits for others, and lives, as far as that is known."""
        return self.call is not None and self.age_s() <= _SILENT_S and not self.is_stopped

    def age_s(self) -> float:
        """Seconds since it was last seen."""
        return max(0.0, time.time() - self.seen_s)


def read_states(run_dir: Path | str) -> list[WorkerState]:
    """What the workers of a run have left, by rank; those that left nothing are missing."""
    files = Path(run_dir, _FOLDER).glob("rank-*.txt")
    states = [state for state in map(_read, files) if state is not None]
    return sorted(states, key=lambda state: state.rank)


def state_folder(run_dir: Path | str) -> Path:
    """Where a run's workers leave their files."""
    return Path(run_dir, _FOLDER)


class LastState:
    """Keeps a worker's file up to date, from `start` to `end`. See [Note: last state].

    As a context manager, once it is started, it ends as its block does.

    A diagnosis must not fail a run: where the file can't be written, there is none.

    Args:
        run_dir: the run's folder; made if missing.
        activity: what the worker is doing.
        number, size: its rank, and how many there are.
        placed: a rank and where it runs, for messages.
        notice_s: how long to wait before saying so; each time twice as long.
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
        place, (_, born) = Place.own(), _stat(os.getpid())
        self._own = WorkerState(
            rank=number,
            size=size,
            host=place.host,
            pid=place.pid,
            space=place.space,
            born=born,
            metrics={},
        )
        self._notice_s = notice_s
        self._lock = threading.RLock()  # a signal's handler may end what its thread is writing
        self._stopped = threading.Event()
        self._fd: int | None = None
        self._has_faults = False

    def start(self) -> Self:
        """Begins the file and its thread."""
        with contextlib.suppress(OSError):
            folder = state_folder(self._run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.glob("rank-*.txt"):  # of an earlier part, on more workers
                if (left := _read(file)) is not None and left.rank >= self._own.size:
                    file.unlink(missing_ok=True)
            file = folder / f"rank-{self._own.rank}.txt"
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.write(self._fd, bytes(_ROOM_BYTES))
            os.lseek(self._fd, _RECORD_BYTES, os.SEEK_SET)
        self._write()
        if self._fd is not None and not faulthandler.is_enabled():  # else it is the user's
            faulthandler.enable(self._fd)
            self._has_faults = True
        self._activity.last_state = self
        atexit.register(self._end_at_exit)
        threading.Thread(target=self._watch, name="allstep last state", daemon=True).start()
        return self

    def end(self, how: str, message: str = "", trace: str = "") -> None:
        """Says how the worker ends; only the first time, and nothing more is written then.

        Args:
            how: one of the words above.
            message: of the error.
            trace: of the error; all threads' stacks come behind it, unless all is well.
        """
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            self._own = replace(self._own, end=how, message=message)
            self._write()
            if self._fd is not None and how not in (WELL, EXITED):
                with contextlib.suppress(OSError):
                    os.write(self._fd, trace.encode(errors="replace")[-_ROOM_BYTES // 4 :])
                    faulthandler.dump_traceback(self._fd)
            if self._has_faults:
                faulthandler.disable()
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None
        self._activity.last_state = None
        atexit.unregister(self._end_at_exit)

    def fail(self, error: BaseException) -> None:
        """The worker ends with an error."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.end(WELL)
        else:
            self.fail(error)

    def _end_at_exit(self) -> None:
        """Of a script that has not closed its communicator, maybe because of an error."""
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
        with self._lock, contextlib.suppress(OSError):  # a full disk, a lost mount
            if self._fd is not None:
                os.pwrite(self._fd, _record(self._now()), 0)

    def _now(self) -> WorkerState:
        doing, now_s = self._activity, time.monotonic()
        call = doing.oldest_call()
        return replace(
            self._own,
            seen_s=time.time(),
            phase=doing.phase,
            phase_s=now_s - doing.since_s,
            step=doing.step,
            call=None if call is None else call[0],
            call_s=0.0 if call is None else now_s - call[1],
            rss_bytes=_rss_bytes(),
            metrics=dict(list(doing.metrics.items())[:_MOST_METRICS]),
        )

    def _notice(self) -> None:
        """Says for whom this worker waits, if it does for long; the first of those who wait."""
        call = self._activity.oldest_call()
        if call is None or time.monotonic() - call[1] < self._notice_s:
            return
        waited_s, self._notice_s = self._notice_s, 2 * self._notice_s
        own, states = self._own.rank, {state.rank: state for state in read_states(self._run_dir)}
        if any(state.waits for rank, state in states.items() if rank < own):
            return
        others = [rank for rank in range(self._own.size) if rank != own]
        words = waiting_words(waited_s, others, states, self._placed)
        if words:
            _logger.warning(words)


def waiting_words(
    waited_s: float,
    others: Sequence[int],
    states: Mapping[int, WorkerState],
    placed: Callable[[int], str],
) -> str:
    """For whom somebody waits; empty if nobody else is there.

    Args:
        waited_s: how long.
        others: the other ranks.
        states: what is known of them.
        placed: a rank and where it runs.

    >>> late = WorkerState(rank=1, size=2, host="b", pid=8, phase="data", step=3, metrics={},
    ...     seen_s=time.time())
    >>> waiting_words(10, [1], {1: late}, "rank {} (process 8 on b)".format)
    'waiting 10 s for rank 1 (process 8 on b), which was last seen in data of step 3'
    >>> waiting_words(10, [1], {}, "rank {} (process 8 on b)".format)
    'waiting 10 s for rank 1 (process 8 on b); what it is doing is not known on this host'
    """
    late = [rank for rank in others if rank in states and not states[rank].waits]
    late = late or [rank for rank in others if rank not in states] or list(others)
    if not late:
        return ""
    words = f"waiting {waited_s:g} s for {placed(late[0])}"
    state = states.get(late[0])
    if state is None:
        words += "; what it is doing is not known on this host"
    else:
        where = state.where if state.call is None else f"`{state.call}`, {state.where}"
        words += f", which was last seen in {where}"
        if state.is_stopped:
            words += f" and is stopped; `kill -CONT {state.pid}` lets it go on"
        elif state.age_s() > _SILENT_S:
            words += f" {state.age_s():.0f} s ago: it hangs, or its host is gone"
    return words + (f"; and {len(late) - 1} other ranks" if len(late) > 1 else "")


def _record(state: WorkerState) -> bytes:
    """One line of JSON, always as long."""
    fields = asdict(replace(state, message=state.message[:_MOST_CHARACTERS]))
    del fields["stacks"]
    line = json.dumps(fields).encode()
    while len(line) >= _RECORD_BYTES:
        fields["message"], fields["metrics"] = fields["message"][: len(fields["message"]) // 2], {}
        line = json.dumps(fields).encode()
    return line.ljust(_RECORD_BYTES - 1) + b"\n"


def _read(file: Path) -> WorkerState | None:
    """None for what is no such file, or can't be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        data = file.read_bytes()
        stacks = data[_RECORD_BYTES:].rstrip(b"\0").decode(errors="replace")
        return WorkerState(**json.loads(data[:_RECORD_BYTES]), stacks=stacks)
    return None


def _rss_bytes() -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _stat(pid: int) -> tuple[str, str]:
    """The kernel's letter for a process, and when it was started; empty if there is none."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words[0], words[19]
    return "", ""
