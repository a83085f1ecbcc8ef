"""A worker's last recorded state, and what it says. See [Note: last state]."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from allstep.comm.places import own_space
from allstep.env import read_stat

WELL, FAILED, SIGNALLED = "ended well", "failed", "ended by a signal"
TIMED_OUT, LOST_PEER, EXITED = "timed out", "lost another rank", "ended without `close`"

RECORD_BYTES = 4096
_FOLDER = "last_state"
_MOST_CHARACTERS, _MOST_METRICS = 1500, 8  # of a message and of metrics that fit a record
_APART_S = 60.0  # largest difference of one run's workers' starts, and of their hosts' clocks
_SILENT_S = 5.0  # time without a new record after which a worker hangs, or its host is gone


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """The state that a worker's file records.

    Attributes:
        rank, size: its rank, and the number of workers.
        host, pid, space, born: where it runs, as in `Place`.
        start_s, seen_s: when it began, and when this was written, in seconds since 1970.
        seen_monotonic_s: when this was written, by `time.monotonic`; None if unknown.
        phase, phase_s, step: what it was doing, for how long, and in which step.
        call, call_s: the call in which it waited, and for how long; `call` is None if it did not
            wait.
        rss_bytes: resident memory.
        metrics: the latest metrics; None for values that are not finite.
        num_total_steps: number of steps of the whole run; None if unknown.
        data_s, compute_s, wait_s: how long a step waited for data, computed, and waited for the
            exchange; means of recent steps.
        straggler: a sentence on which worker keeps the others waiting, and what helps; empty if
            none does.
        end, message: how it ended, None while it runs, and the error's message.
        stacks: stacks of its threads; empty if it has written none.
    """

    rank: int
    size: int
    host: str
    pid: int
    space: str = ""
    born: str = ""
    start_s: float = 0.0
    seen_s: float = 0.0
    seen_monotonic_s: float | None = None
    phase: str = "start"
    phase_s: float = 0.0
    step: int | None = None
    call: str | None = None
    call_s: float = 0.0
    rss_bytes: int = 0
    metrics: Mapping[str, float | None]
    num_total_steps: int | None = None
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    straggler: str = ""
    end: str | None = None
    message: str = ""
    stacks: str = ""

    @property
    def where(self) -> str:
        """The phase and step in which it was last seen.

        >>> WorkerState(rank=0, size=1, host="a", pid=7, phase="data", step=3, metrics={}).where
        'data of step 3'
        """
        return self.phase if self.step is None else f"{self.phase} of step {self.step}"

    @cached_property
    def process(self) -> str:
        """The kernel's letter for its process's state, "" if it is gone, "?" on another host.

        Read only once, so that everything that is said about the worker is consistent.
        """
        if not self.space or self.space != own_space():
            return "?"
        with contextlib.suppress(OSError):
            stat = read_stat(self.pid)
            return "" if stat.has_ended or stat.start != self.born else stat.state
        return ""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process; False on another host, where it is unknown."""
        return self.process in ("T", "t")

    @property
    def waits(self) -> bool:
        """Whether it waits for others and still lives, as far as is known."""
        return self.call is not None and self.age_s() <= _SILENT_S and not self.is_stopped

    def age_s(self) -> float:
        """Seconds since it was last seen; for another host by the two hosts' clocks."""
        if self.seen_monotonic_s is not None and self.space and self.space == own_space():
            return time.monotonic() - self.seen_monotonic_s
        return max(0.0, time.time() - self.seen_s)


def read_states(run_dir: Path | str) -> list[WorkerState]:
    """The states that a run's workers have recorded, in rank order; some ranks may be missing.

    States from an earlier part of the run, of a worker that now runs elsewhere, are omitted.
    """
    files = state_folder(run_dir).glob("rank-*.txt")
    states = [state for state in map(read_state, files) if state is not None]
    newest_s = max((state.start_s for state in states), default=0.0)
    # After its clock was set back, a worker seems to be last seen before its own start.
    of_now = [s for s in states if max(s.start_s, s.seen_s) > newest_s - _APART_S]
    return sorted(of_now, key=lambda state: state.rank)


def state_folder(run_dir: Path | str) -> Path:
    """The folder of a run's workers' files."""
    return Path(run_dir, _FOLDER)


def waiting_words(
    waited_s: float,
    others: Sequence[int],
    states: Mapping[int, WorkerState],
    placed: Callable[[int], str],
) -> str:
    """A description of the ranks that a worker waits for; empty if there are no others.

    Args:
        waited_s: how long it has waited, in seconds.
        others: the other ranks.
        states: rank -> its state, as far as it is known.
        placed: rank -> the rank and where it runs, for messages.

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


def record_of(state: WorkerState) -> bytes:
    """The state as one line of JSON, of a fixed length."""
    kept = list(state.metrics.items())[:_MOST_METRICS]
    metrics = {name: _finite(value) for name, value in kept}
    short = replace(state, message=state.message[:_MOST_CHARACTERS], metrics=metrics)
    fields = asdict(short)
    del fields["stacks"]
    line = json.dumps(fields).encode()
    while len(line) >= RECORD_BYTES:
        fields["message"], fields["metrics"] = fields["message"][: len(fields["message"]) // 2], {}
        line = json.dumps(fields).encode()
    return line.ljust(RECORD_BYTES - 1) + b"\n"


def _finite(value: float | None) -> float | None:
    """The value, or None for NaN and infinities, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def read_state(file: Path) -> WorkerState | None:
    """The state in a file; None if there is no such file, or it can't be read."""
    state = _read_state(file)
    if state is not None and state.end is None and not state.process:
        return _read_state(file)  # it may just have ended and recorded how
    return state


def _read_state(file: Path) -> WorkerState | None:
    for _ in range(3):  # the file may just be being written
        with contextlib.suppress(OSError, ValueError, TypeError):
            data = file.read_bytes()
            stacks = data[RECORD_BYTES:].rstrip(b"\0").decode(errors="replace")
            return WorkerState(**json.loads(data[:RECORD_BYTES]), stacks=stacks)
    return None
