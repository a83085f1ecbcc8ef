"""Runs a script on a number of workers, and collects their records or their failure."""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from allstep.cli.launch import Workers
from allstep.cli.script_worker import PRELOAD, VERIFY
from allstep.cli.worker import last_lines
from allstep.doctor import (
    Factor,
    Failure,
    RunRecord,
    read_worker,
    record_path,
    run_text,
    total_norm,
)
from allstep.errors import UsageError

_NUM_LOG_LINES = 10


@dataclass(frozen=True, kw_only=True)
class Start:
    """The number of workers for a run, the script's arguments, and the workers' mesh.

    Attributes:
        size: number of workers.
        arguments: the script's own.
        axes: name -> length, of the mesh; empty if only the number was asked for.
    """

    size: int
    arguments: Sequence[str]
    axes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return run_text(self.size, self.axes)


@dataclass(kw_only=True)
class Runs:
    """All runs of one script, each made once.

    Args:
        script: what to run.
        folder: for the workers' records.
        timeout_s: longest time without a forward or a step.
        console: where to say what is going on, if it is a terminal.
        launch: starts workers, as `launch_workers` does.
    """

    script: Path
    folder: Path
    timeout_s: float
    console: Console
    launch: Callable[[Workers], int]
    _made: dict[tuple[str, int, tuple[Factor, ...]], RunRecord] = field(default_factory=dict)

    def make(
        self,
        start: Start,
        num_steps: int,
        without: Sequence[Factor] = (),
        whole: RunRecord | None = None,
    ) -> RunRecord:
        """Runs the script's first steps, without the given factors.

        Args:
            start: on which workers.
            num_steps: how many.
            without: what to take out.
            whole: an earlier run, in which parameters are whole that the script may cut itself.

        Raises:
            UsageError: if the script fails, or trains no attached model.
            SystemExit: if a signal has ended it.
        """
        key = (str(start), num_steps, tuple(without))
        if key not in self._made:
            removed = f" without {' and '.join(without)}" if without else ""
            with self.console.status(f"{self.script} on {start}{removed}, {num_steps} steps"):
                self._made[key] = self._launch(start, num_steps, without, whole)
        return self._made[key]

    def _launch(
        self, start: Start, num_steps: int, without: Sequence[Factor], whole: RunRecord | None
    ) -> RunRecord:
        size = start.size
        folder = Path(tempfile.mkdtemp(dir=self.folder))  # a run that failed has left its own
        asked = {
            "script": str(self.script),
            "arguments": list(start.arguments),
            "num_steps": num_steps,
            "timeout_s": self.timeout_s,
            "without": list(without),
            "axes": dict(start.axes),
            "shapes": {} if whole is None else whole.first.shapes,
        }
        code = self.launch(Workers(size, VERIFY, folder, asked, has_logs=True, preload=PRELOAD))
        paths = [record_path(folder, rank) for rank in range(size)]
        records = {rank: read_worker(path) for rank, path in enumerate(paths) if path.exists()}
        failed = {rank: r.failure for rank, r in records.items() if r.failure is not None}
        if failed:
            raise UsageError(
                f"`script` (={self.script}) {self._explain(failed, str(start), folder)}"
            )
        if code > 128:
            sys.exit(code)
        if len(records) < size:
            missing = min(set(range(size)) - set(records))
            raise UsageError(
                f"`script` (={self.script}) ended on {start} before it was recorded"
                f" (rank {missing}).{_last_lines(folder, missing)}"
            )
        run = RunRecord([records[rank] for rank in range(size)], start.axes)
        self._check_trained(run, str(start), has_all=not without)
        return run

    def _explain(self, failed: Mapping[int, Failure], workers: str, folder: Path) -> str:
        stuck = next((failure for failure in failed.values() if failure.kind == "timeout"), None)
        if stuck is not None:
            places = "".join(f"rank {rank}:\n{failed[rank].text}" for rank in sorted(failed))
            return replace(stuck, text=places).words(self.timeout_s, f" on {workers}")
        rank = min(failed, key=lambda rank: (not failed[rank].is_own, failed[rank].time_s))
        where = f" on {workers}" + (f" (rank {rank})" if workers != "1 worker" else "")
        last = _last_lines(folder, rank) if failed[rank].kind == "exit" else ""
        return failed[rank].words(self.timeout_s, where) + last

    def _check_trained(self, run: RunRecord, workers: str, *, has_all: bool) -> None:
        if not any(worker.num_attached for worker in run.workers):
            raise UsageError(
                f"`script` (={self.script}) never called `allstep.attach` on {workers}, so that"
                " there is no model to compare: attach the one that it trains,"
                " allstep.attach(model, comm)."
            )
        if not run.num_steps:
            raise UsageError(
                f"`script` (={self.script}) made no step on {workers}: no optimizer with"
                " parameters of an attached model was stepped. Does it train at once, with these"
                " arguments?"
            )
        gradients = (step.gradients for worker in run.workers for step in worker.steps)
        if has_all and not any(map(total_norm, gradients)):
            raise UsageError(
                f"`script` (={self.script}) has no gradient but zero in {run.num_steps} steps on"
                f" {workers}, which so say nothing: does it leave out its first batches? `--steps`"
                " runs more."
            )


def _last_lines(folder: Path, rank: int) -> str:
    lines = last_lines(folder, rank, _NUM_LOG_LINES)
    if not lines:
        return " It printed nothing."
    return "\n".join([" Its last lines:", *lines])
