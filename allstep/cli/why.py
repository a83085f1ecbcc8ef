"""`allstep why RUN`: finds the first failure of a run that died or hangs, and its cure."""

import argparse
import errno
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from allstep.cli import run_folder
from allstep.cli.exits import Exits, read_exits, signal_name
from allstep.cli.rows import make_console, print_json
from allstep.cli.symptoms import Symptom, symptoms_of
from allstep.comm import (
    EXITED,
    FAILED,
    LOST_PEER,
    SIGNALLED,
    TIMED_OUT,
    WorkerState,
    read_states,
    state_folder,
)
from allstep.errors import UsageError

_SILENT_S = 10.0  # after which something is wrong with a worker that writes twice a second
_LOST_S = 60.0  # the same of another host, whose clock may differ
_FATAL = re.compile(r"Fatal Python error: (.+)")
_FRAME = re.compile(r'Current thread .*?\n  File "(.+?)", line (\d+) in (.+)')


@dataclass(frozen=True)
class Finding:
    """The first failure of a run.

    Attributes:
        what: a word for programs: failed, crashed, killed, stopped, lost, timed out, signalled,
            running, ended well, unknown.
        rank: whose fault it is; None if nobody's.
        words: a sentence.
        cure: what to do; may be empty.
    """

    what: str
    rank: int | None
    words: str
    cure: str = ""


def run(arguments: list[str]) -> int:
    """Reads the last states of a run's workers, and prints what happened."""
    parser = argparse.ArgumentParser(
        prog="allstep why",
        description="Says what happened first in a run that died or hangs, where, and what to do.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run",
        metavar="RUN | MESSAGE",
        help="the run's folder, or an error's message, or a part of it",
    )
    parser.add_argument("--json", action="store_true", help="print it for programs")
    known = parser.parse_args(arguments)
    if not os.path.isdir(known.run) and (symptoms := symptoms_of(known.run)):
        _print_symptoms(symptoms, known.json)
        return 0
    run_dir = Path(known.run)
    try:
        states, exits = left_states(run_dir), read_exits(run_dir)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # as a whole message is for a path
            raise
        states, exits = [], None
    if not states:
        raise UsageError(
            f"`run` (={run_dir}) has nothing that its workers left, in"
            f" {state_folder(run_dir)}: give the folder of a run that has begun; on another host"
            " it may be there. Nor is it a message of the guide «Troubleshooting»."
        )
    finding = find_cause(states, exits)
    if known.json:
        rows = [plain_row(state) for state in states]
        codes = None if exits is None else exits.codes
        print_json({**asdict(finding), "exit_codes": codes, "ranks": rows})
        return 0
    _print(run_dir, finding, states, exits)
    return 0


def _print_symptoms(symptoms: Sequence[Symptom], is_json: bool) -> None:
    if is_json:
        print_json([{"cause": symptom.cause, "cure": symptom.cure} for symptom in symptoms])
        return
    for symptom in symptoms:
        print(f"Cause: {symptom.cause}\nCure: {symptom.cure}")


def left_states(run_dir: Path) -> list[WorkerState]:
    """The last states of a run's workers by rank, since its last start."""
    states = read_states(run_dir)
    return [state for state in states if state.rank < states[0].size]


def plain_row(state: WorkerState) -> dict[str, Any]:
    """A worker's state as plain data."""
    return {**asdict(state), "process_state": state.process}


def is_over(states: Sequence[WorkerState]) -> bool:
    """Whether all workers have ended, as far as is known."""
    return all(state.end or not state.process or _is_lost(state) for state in states)


def _is_lost(state: WorkerState) -> bool:
    return state.process == "?" and state.age_s() > _LOST_S


def find_cause(states: Sequence[WorkerState], exits: Exits | None) -> Finding:
    """Finds the first failure of a run.

    Args:
        states: of the workers that left one; at least one.
        exits: what the launcher saw, if there was one that tells.
    """
    open_ended = [state for state in states if state.end is None]
    gone = [state for state in open_ended if not state.process]
    for look in (_failure, _crash):
        if (finding := look(states)) is not None:
            return finding
    if exits is not None and (finding := _death(states, exits)) is not None:
        return finding
    if (finding := _stop(open_ended)) is not None:
        return finding
    if gone:
        seen = f"is gone without a word, as by kill -9, last seen in {gone[0].where}"
        words = f"{_named(gone[0])} {seen}{_memory(gone[0])}."
        return Finding("killed", gone[0].rank, words, _KILLED)
    if open_ended and not any(state.end in (TIMED_OUT, LOST_PEER) for state in states):
        first = open_ended[0]
        return Finding("running", None, f"The run goes on; {_named(first)} is in {first.where}.")
    return _time_out(states) or _ending(states)


def _failure(states: Sequence[WorkerState]) -> Finding | None:
    failed = [state for state in states if state.end == FAILED]
    if not failed:
        return None
    state = min(failed, key=lambda state: state.seen_s)
    others = " The other ranks ended because of that." if state.size > 1 else ""
    return Finding(
        "failed",
        state.rank,
        f"{_named(state)} failed in {state.where}: {state.message or 'it says no more'}{others}",
        next((symptom.cure for symptom in symptoms_of(state.message)), ""),
    )


def _crash(states: Sequence[WorkerState]) -> Finding | None:
    for state in states:
        fatal = _FATAL.search(state.stacks)
        if state.end is None and state.process in ("", "?") and fatal:  # not a loader's
            frame = _FRAME.search(state.stacks)
            at = f", at {frame[1]}:{frame[2]} in {frame[3]}" if frame else ""
            return Finding(
                "crashed",
                state.rank,
                f"{_named(state)} got a fatal signal ({fatal[1]}) in {state.where}{at}.",
                "Native code did that: look at the stack, and at what was built for another"
                " version.",
            )
    return None


def _death(states: Sequence[WorkerState], exits: Exits) -> Finding | None:
    """The failure of the worker that ended first, by its launcher's record."""
    rank, code = exits.first, exits.codes[exits.first] or 0
    state = next((state for state in states if exits.rank_of(state) == rank), None)
    if code >= 0 or (state is None and any(other.rank == rank for other in states)):
        return None  # others went on without it
    own_rank = rank if state is None else state.rank
    name = f"rank {rank}" if state is None else _named(state)
    seen = ", before it left a word" if state is None else f", last seen in {state.where}"
    if rank in exits.killed:
        return Finding(
            "stopped",
            own_rank,
            f"{name} did not answer and was killed by its launcher{seen}; the others had waited"
            " for it.",
            "It was stopped (SIGSTOP, a debugger), or hung in native code or in a file system.",
        )
    words = f"{name} was killed by {signal_name(-code)}{seen}{_memory(state)}."
    return Finding("killed", own_rank, words, _KILLED if -code == signal.SIGKILL else "")


_KILLED = (
    "Out of memory? `dmesg -T | grep -i 'killed process'` on that host tells, or `journalctl -k`;"
    " then a smaller `micro_batch` or fewer loader processes help."
)


def _stop(open_ended: Sequence[WorkerState]) -> Finding | None:
    """The failure of a worker that hangs, or whose host is gone."""
    for state in open_ended:
        age_s, process = state.age_s(), state.process
        if state.is_stopped or (process not in ("", "?") and age_s > _SILENT_S):
            what = "is stopped" if state.is_stopped else "gives no sign"
            return Finding(
                "stopped",
                state.rank,
                f"{_named(state)} {what}: last seen {age_s:.0f} s ago in {state.where}.",
                f"`kill -CONT {state.pid}` on {state.host} lets a stopped process go on.",
            )
        if _is_lost(state):
            return Finding(
                "lost",
                state.rank,
                f"{_named(state)} was lost: last seen at {_time(state)} in {state.where}.",
                f"Look at {state.host} and the network to it: it may be down, or the process was"
                " killed there.",
            )
    return None


def _time_out(states: Sequence[WorkerState]) -> Finding | None:
    waited = [state for state in states if state.end == TIMED_OUT]
    if not waited:
        return None
    late = [state for state in states if state.end != TIMED_OUT and state.call is None]
    ranks = ", ".join(str(state.rank) for state in waited)
    words = f"rank {ranks} waited until the timeout"
    if not late:
        return Finding("timed out", None, f"{words}: {waited[0].message}")
    state = late[0]
    return Finding(
        "timed out",
        state.rank,
        f"{words} for {_named(state)}, which was in {state.where} for {state.phase_s:.0f} s.",
        "Its stacks say where; if it is only slow, raise `timeout_s`.",
    )


def _ending(states: Sequence[WorkerState]) -> Finding:
    """The finding where no worker failed by itself."""
    for end, what in ((SIGNALLED, "signalled"), (LOST_PEER, "unknown"), (EXITED, "unknown")):
        for state in states:
            if state.end == end:
                message = f" ({state.message})" if state.message else ""
                words = f"{_named(state)} {end}{message} in {state.where}"
                missing = sorted(set(range(state.size)) - {other.rank for other in states})
                if end == LOST_PEER and missing:
                    words += f"; rank {missing[0]} left nothing here: look at its host"
                return Finding(what, state.rank, f"{words}.")
    first = states[0]
    return Finding(
        "ended well", None, f"The run ended well, at {_time(first)}, after {first.where}."
    )


def _print(
    run_dir: Path, finding: Finding, states: Sequence[WorkerState], exits: Exits | None
) -> None:
    console = make_console()
    lines = [finding.words[:1].upper() + finding.words[1:], finding.cure]
    if any(state.rank == finding.rank and state.stacks for state in states):
        lines.append(f"Its stacks: {state_folder(run_dir) / f'rank-{finding.rank}.txt'}")
    if is_over(states) and finding.what != "ended well" and run_folder.can_resume(run_dir):
        command = run_folder.resume_command(run_dir, states[0].size)
        lines.append(f"The run can be continued: {command}")
    for line in filter(None, lines):
        console.print(line, markup=False, soft_wrap=True)
    table = Table("rank", "host", "process", "end", "last seen in", "at", "memory", box=None)
    left = {state.rank: state for state in states}
    for rank in range(states[0].size):
        state = left.get(rank)
        code = (
            "" if exits is None else _exit(exits, rank if state is None else exits.rank_of(state))
        )
        if state is None:
            table.add_row(str(rank), "", "", code or "left nothing here", "", "", "")
            continue
        end = state.end or code or _still(state)
        memory = f"{state.rss_bytes / 1e6:,.0f} MB"
        where = state.where + (f", `{state.call}` {state.call_s:.0f} s" if state.call else "")
        table.add_row(str(rank), state.host, str(state.pid), end, where, _time(state), memory)
    console.print(table)


def _still(state: WorkerState) -> str:
    words = {"": "gone", "?": "not known"}
    return "stopped" if state.is_stopped else words.get(state.process, "runs")


def _exit(exits: Exits, rank: int | None) -> str:
    if rank is None or rank >= len(exits.codes):
        return ""
    code = exits.codes[rank]
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"{signal_name(-code)}{' by its launcher' if rank in exits.killed else ''}"


def _named(state: WorkerState) -> str:
    return f"rank {state.rank} (process {state.pid} on {state.host})"


def _memory(state: WorkerState | None) -> str:
    return "" if state is None else f" with {state.rss_bytes / 1e6:,.0f} MB of memory"


def _time(state: WorkerState) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.seen_s))
