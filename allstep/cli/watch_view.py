"""The state of a running run, from its folder, for `allstep watch`.

It is only read: a run that is watched does not notice. What stands there is written by each
worker's last state, twice a second, and by rank 0's log, every `--log-every-steps` steps.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allstep.cli import run_folder
from allstep.cli.exits import read_exits
from allstep.cli.why import Finding, find_cause, is_over, left_states, plain_row
from allstep.comm import WorkerState
from allstep.errors import UsageError
from allstep.recipes import AnyRecipe
from allstep.train import read_metrics

_TAIL_BYTES = 65536  # of the log, which may be long
_NUM_LOSSES = 16
_NUM_LINES = 20  # of the log, by which the time left is reckoned
_NOT_BEGUN = Finding(
    "not begun",
    None,
    "No worker has left anything here yet.",
    "It is starting, or its workers keep their files on another host: watch it there.",
)
_REPORTED = Finding(
    "unknown",
    None,
    "The run is over: what it came to is in its report.json; nothing else of its workers is here.",
)


@dataclass(frozen=True, kw_only=True)
class View:
    """A run's state at one moment.

    Attributes:
        run: its folder.
        recipe, epochs: what is trained and how many passes; None for an own script.
        finding: how it is with the run, in the words of `allstep why`.
        is_over: whether no worker goes on.
        step: optimizer steps done; None before the first is known.
        num_total_steps: of the whole run; None if that is not known.
        epoch: whole passes over the data done.
        losses: mean losses since the line before, of the newest lines of the log.
        samples_per_s: of all workers together.
        time_left_s: until the last step; None if that can't be told.
        micro_batches: of each worker in a global batch; empty if all have as many.
        straggler: who keeps the others waiting, and the cure; empty if nobody.
        workers: those that left something here.
    """

    run: Path
    recipe: str | None
    epochs: int | None
    finding: Finding
    is_over: bool
    step: int | None
    num_total_steps: int | None
    epoch: int | None
    losses: Sequence[float]
    samples_per_s: float | None
    time_left_s: float | None
    micro_batches: Sequence[int]
    straggler: str
    workers: Sequence[WorkerState]

    def as_plain(self) -> dict[str, Any]:
        """The view as plain data."""
        plain = asdict(self)
        del plain["workers"]
        finding = plain.pop("finding")
        return {
            **plain,
            **finding,
            "run": str(self.run),
            "loss": self.losses[-1] if self.losses else None,
            "ranks": [plain_row(state) for state in self.workers],
        }


def read_named_recipe(run_dir: Path) -> AnyRecipe | None:
    """The run's recipe; None for a user's script."""
    if not run_folder.is_run(run_dir) and left_states(run_dir):
        return None
    return run_folder.read_recipe(run_dir, argument="run")


def read_view(run_dir: Path, recipe: AnyRecipe | None) -> View:
    """Reads the present view from the folder.

    Args:
        run_dir: the run's folder.
        recipe: from `read_named_recipe`.
    """
    states = left_states(run_dir)
    lines = _lines(run_dir, states)
    losses = [line["loss"] for line in lines if "loss" in line]
    speeds = [line["samples_per_s"] for line in lines if "samples_per_s" in line]
    step = _step(states, lines)
    total = next((s.num_total_steps for s in states if s.num_total_steps is not None), None)
    has_ended = is_over(states) if states else run_folder.has_report(run_dir)
    unseen = _REPORTED if has_ended else _NOT_BEGUN
    return View(
        run=run_dir,
        recipe=None if recipe is None else recipe.name,
        epochs=getattr(recipe, "epochs", None),
        finding=find_cause(states, read_exits(run_dir)) if states else unseen,
        is_over=has_ended,
        step=step,
        num_total_steps=total,
        epoch=int(lines[-1]["epoch"]) if lines else None,
        losses=losses[-_NUM_LOSSES:],
        samples_per_s=speeds[-1] if speeds else None,
        time_left_s=None if has_ended else _time_left_s(states, lines, step, total),
        micro_batches=_micro_batches(lines),
        straggler=next((state.straggler for state in states if state.straggler), ""),
        workers=states,
    )


def _lines(run_dir: Path, states: Sequence[WorkerState]) -> list[dict[str, float]]:
    """The newest lines of the log, without steps that a resumed run has yet to repeat."""
    try:
        read = read_metrics(run_dir, last_bytes=_TAIL_BYTES)
    except (UsageError, OSError):  # there is none yet
        return []
    places = ("time", "epoch")
    lines = [line for line in read if all(math.isfinite(line.get(x, math.nan)) for x in places)]
    if not states or states[0].step is None:
        return lines
    start_s, step = states[0].start_s, states[0].step
    return [line for line in lines if line["time"] >= start_s or line["step"] <= step]


def _step(states: Sequence[WorkerState], lines: Sequence[dict[str, float]]) -> int | None:
    """The highest step that a worker is in, or that is logged; None if there is none."""
    seen = [state.step for state in states if state.step is not None]
    logged = [int(line["step"]) for line in lines[-1:]]
    return max(seen + logged, default=None)


def _time_left_s(
    states: Sequence[WorkerState],
    lines: Sequence[dict[str, float]],
    step: int | None,
    num_total_steps: int | None,
) -> float | None:
    """The time left at the pace of the newest lines since the last start, with evaluations."""
    if not states or step is None or num_total_steps is None:
        return None
    recent = [line for line in lines if line["time"] >= states[0].start_s][-_NUM_LINES:]
    if len(recent) < 2:
        return None
    first, last = recent[0], recent[-1]
    seconds = (last["time"] - first["time"]) / (last["step"] - first["step"])
    return max(0.0, seconds * (num_total_steps - step))


def _micro_batches(lines: Sequence[dict[str, float]]) -> list[int]:
    """The micro-batches by rank in the newest line about steps."""
    newest = next((line for line in reversed(lines) if "loss" in line), {})
    counts: list[int] = []
    with contextlib.suppress(KeyError, ValueError, OverflowError):  # none more, or no number
        while True:
            counts.append(int(newest[f"micro_batches/rank_{len(counts)}"]))
    return counts
