"""`allstep watch RUN`: shows a run's progress and its workers, live."""

import argparse
import math
import shlex
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from allstep.cli.interruptible import interruptible
from allstep.cli.rows import make_console, make_table, print_json
from allstep.cli.watch_view import View, read_named_recipe, read_view
from allstep.comm import WorkerState
from allstep.errors import UsageError, check_positive
from allstep.recipes import AnyRecipe

_BARS = "▁▂▃▄▅▆▇█"
_MOST_INTERVAL_S = 3600
_LATE_S = 5.0  # of a worker's file, which is written twice a second


def run(
    arguments: list[str],
    *,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Shows a run until it is over; only once if the output is no terminal.

    Args:
        arguments: what follows `allstep watch`.
        console: where to show it; None means standard output.
        sleep: waits for so many seconds.
    """
    parser = argparse.ArgumentParser(
        prog="allstep watch",
        description="Shows a run's progress and its workers live, until the run is over. It only"
        " reads the run's folder: on this machine, or on a file system that is shared with it.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--once", action="store_true", help="print it once, as in a pipe")
    parser.add_argument("--json", action="store_true", help="print it once, for programs")
    parser.add_argument(
        "--interval-s", metavar="S", type=float, default=1.0, help="seconds between two looks; 1"
    )
    known = parser.parse_args(arguments)
    check_positive("interval_s", known.interval_s, "1 is usual")
    if known.interval_s > _MOST_INTERVAL_S:
        raise UsageError(
            f"`interval_s` (={known.interval_s:g}) must be at most {_MOST_INTERVAL_S}; 1 is usual."
        )
    recipe = read_named_recipe(known.run)
    console = console or make_console()
    if known.json:
        print_json(read_view(known.run, recipe).as_plain())
    elif known.once or not console.is_terminal:
        for part in _render(read_view(known.run, recipe), console):
            console.print(part, soft_wrap=isinstance(part, Text))
    else:
        return _watch(known.run, recipe, console, lambda: sleep(known.interval_s))
    return 0


def _watch(
    run_dir: Path, recipe: AnyRecipe | None, console: Console, wait: Callable[[], None]
) -> int:
    with interruptible(), Live(console=console, auto_refresh=False) as live:
        while True:
            view = read_view(run_dir, recipe)
            live.update(Group(*_render(view, console)), refresh=True)
            if view.is_over:
                return 0
            wait()


def _render(view: View, console: Console) -> list[RenderableType]:
    """Renders a view, the most important lines first, as a screen may be too low for all."""
    parts: list[RenderableType] = [
        Text.assemble((view.recipe or "own script", "bold"), f"  {view.run}")
    ]
    if progress := _progress(view, draws=not console.options.ascii_only):
        parts.append(Text(progress))
    finding = view.finding
    if finding.what != "running":
        words = finding.words[:1].upper() + finding.words[1:]
        parts.append(Text(f"{words} {finding.cure}".rstrip(), style="bold"))
    if view.workers and finding.what not in ("running", "ended well"):
        parts.append(Text(f"More: allstep why {shlex.quote(str(view.run))}"))
    if view.straggler:
        parts.append(Text(view.straggler[:1].upper() + view.straggler[1:], style="yellow"))
    if view.workers:
        parts.append(_table(view, cuts=console.is_terminal))
    return parts


def _progress(view: View, *, draws: bool) -> str:
    words = []
    if view.epoch is not None:
        epoch = view.epoch + 1 if view.epochs is None else min(view.epoch + 1, view.epochs)
        words.append(f"epoch {epoch}" + (f"/{view.epochs}" if view.epochs else ""))
    if view.step is not None:
        total = "" if view.num_total_steps is None else f"/{view.num_total_steps:,}"
        words.append(f"step {view.step:,}{total}")
    if view.losses:
        bars = f" {_bars(view.losses)}" if draws else ""
        words.append(f"loss {view.losses[-1]:.4f}{bars}")
    if view.samples_per_s is not None:
        words.append(f"{view.samples_per_s:,.0f} samples/s")
    if view.time_left_s is not None:
        words.append(f"{timedelta(seconds=round(view.time_left_s))} left")
    return "  ".join(words)


def _bars(values: Sequence[float]) -> str:
    """A bar chart of numbers, scaled from the lowest to the highest; ? for nonfinite ones.

    >>> _bars([3.0, 2.0, float("nan"), 1.0])
    '█▄?▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[int((value - low) * scale)] if math.isfinite(value) else "?" for value in values
    )


def _table(view: View, *, cuts: bool) -> Table:
    """A table with a row for each worker, of one line, so that more of them fit a screen."""
    shares = ("micro-batches",) if view.micro_batches else ()
    titles = ("rank", "host", "doing", "for", *shares, "data", "compute", "wait")
    table = make_table(*titles, left=["host", "doing"])
    for column in table.columns:
        column.no_wrap = column.justify == "right"
    left = {state.rank: state for state in view.workers}
    for rank in range(view.workers[0].size):
        state = left.get(rank)
        if state is None:
            table.add_row(str(rank), "", "left nothing here")
        else:
            doing, since = _doing(state)
            words = (Text(each, no_wrap=cuts, overflow="ellipsis") for each in (state.host, doing))
            numbers = [str(number) for number in view.micro_batches[rank : rank + 1]]
            table.add_row(str(rank), *words, since, *numbers, *_times(state))
    return table


def _doing(state: WorkerState) -> tuple[str, str]:
    """A worker's phase and how long it has lasted; empty if the worker is gone."""
    if state.end is not None:
        return f"{state.end} in {state.where}", ""
    if not state.process:
        return f"gone, last seen in {state.where}", ""
    age_s = state.age_s()
    if state.is_stopped or age_s > _LATE_S:
        seen = "stopped" if state.is_stopped else "no sign"
        return f"{seen}, last seen in {state.where}", _seconds(age_s)
    if state.call is not None:
        return f"{state.where}, waits in `{state.call}`", _seconds(state.call_s)
    return state.where, _seconds(state.phase_s)


def _seconds(seconds: float) -> str:
    """A time in words; short ones with one digit more.

    >>> _seconds(0.25), _seconds(75.3)
    ('0.2 s', '0:01:15')
    """
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=int(seconds)))


def _times(state: WorkerState) -> list[str]:
    """The shares of data, compute and waiting in a step's time; empty if none was timed."""
    times_s = [state.data_s, state.compute_s, state.wait_s]
    total_s = sum(times_s)
    return [f"{seconds / total_s:.0%}" for seconds in times_s] if total_s else []
