"""What a sweep came to: a table, for people and programs, and a picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.cli.output_files import can_draw, new_figure, writing_errors
from allstep.cli.rows import make_console, make_table
from allstep.cli.sweep_plan import Plan
from allstep.cli.trainings import Outcome, metric_of, write_json
from allstep.files import write_table

_WIDE_RATIO = 8  # of numbers that a logarithmic axis shows better


@dataclass(frozen=True)
class Row:
    """A training of the sweep.

    Attributes:
        values: of the flags that have several.
        outcome: what became of it.
        score: what it is sorted by; NaN if it has none.
    """

    values: Mapping[str, str]
    outcome: Outcome
    score: float

    @property
    def state(self) -> str:
        """A word."""
        if self.outcome.report is not None:
            return "finished"
        return "failed" if self.outcome.failure is not None else "open"

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the last evaluation; empty without one."""
        return {} if self.outcome.report is None else self.outcome.report["metrics"]

    def as_plain(self) -> dict[str, Any]:
        """For programs; `null` for what there is not."""
        report = self.outcome.report or {}
        return {
            **self.values,
            "state": self.state,
            "score": self.score if math.isfinite(self.score) else None,
            **{name: x if math.isfinite(x) else None for name, x in self.metrics.items()},
            "steps": report.get("num_steps"),
            "run": str(self.outcome.training.run_dir),
            "failure": self.outcome.failure,
        }


@dataclass(frozen=True)
class Results:
    """All rows, the best first, then those that have no score in the plan's order.

    Attributes:
        axes: the flags with several values.
        metric: what runs are sorted by.
        rows: one a training.
    """

    axes: Sequence[str]
    metric: str
    rows: Sequence[Row]


def make_results(plan: Plan, outcomes: Sequence[Outcome]) -> Results:
    """What a sweep came to so far."""
    recipe = plan.trainings[0].recipe
    rows = [
        Row(
            plan.values[each.training.name],
            each,
            math.nan if each.report is None else metric_of(each.training.recipe, each.report),
        )
        for each in outcomes
    ]
    sign = 1 if recipe.best_mode == "min" else -1
    rows.sort(key=lambda row: math.inf if math.isnan(row.score) else sign * row.score)
    return Results(list(plan.axes), recipe.best_metric or "accuracy", rows)


def show(results: Results) -> None:
    """Prints the table."""
    console = make_console()
    metrics = list(next((row.metrics for row in results.rows if row.metrics), {}))
    best = [] if results.metric == "accuracy" else [f"best {results.metric}"]
    table = make_table(*results.axes, *best, *metrics, "steps", "run", left=["run"])
    for column in table.columns:
        column.overflow = "fold"
    for row in results.rows:
        report = row.outcome.report or {}
        numbers = [f"{row.score:.4f}"] if best else []
        numbers += [f"{row.metrics[name]:.4f}" if row.metrics else "" for name in metrics]
        run = str(row.outcome.training.run_dir)
        if row.state != "finished":
            run = f"{run} {row.state}"
        steps = str(report.get("num_steps", ""))
        table.add_row(*(row.values[name] for name in results.axes), *numbers, steps, run)
    console.print(table)
    for row in results.rows:
        if row.outcome.failure is not None:
            name = row.outcome.training.name
            console.print(f"{name} failed: {row.outcome.failure}", soft_wrap=True, markup=False)


def as_plain(results: Results) -> dict[str, Any]:
    """All of it for programs."""
    return {"metric": results.metric, "runs": [row.as_plain() for row in results.rows]}


def write_files(folder: Path, results: Results) -> list[str]:
    """Writes table.json, table.csv and, if there is something to draw with, plot.png.

    Returns:
        The files' names.

    Raises:
        UsageError: if one can't be written.
    """
    plain = [row.as_plain() for row in results.rows]
    write_json(folder / "table.json", as_plain(results))
    names = list(dict.fromkeys(name for row in plain for name in row))
    with writing_errors(str(folder)):
        write_table(folder / "table.csv", names, plain)
        if not can_draw():
            return ["table.json", "table.csv"]
        _make_figure(results).savefig(folder / "plot.png", dpi=120)
    return ["table.json", "table.csv", "plot.png"]


def _make_figure(results: Results) -> Any:
    """The score over the first flag whose values are numbers; a line for each of the others'."""
    figure = new_figure()
    axes = figure.subplots()
    rows = [row for row in results.rows if math.isfinite(row.score)]
    numeric = [name for name in results.axes if all(_is_number(row.values[name]) for row in rows)]
    x_name = next((name for name in (*numeric, *results.axes) if name != "seed"), None)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        others = [f"{k} {v}" for k, v in row.values.items() if k not in (x_name, "seed")]
        lines.setdefault(", ".join(others), []).append(row)
    for label, own in sorted(lines.items()):
        points = sorted((_place(row, x_name, numeric), row.score) for row in own)
        is_line = x_name in numeric and "seed" not in results.axes
        axes.plot(*zip(*points, strict=True), "o-" if is_line else "o", label=label or None)
    if x_name in numeric:
        places = [float(row.values[x_name]) for row in rows]
        if places and min(places) > 0 and max(places) / min(places) >= _WIDE_RATIO:
            axes.set_xscale("log")
    axes.set(xlabel=x_name or "", ylabel=results.metric)
    axes.grid(alpha=0.3)
    if any(lines):
        axes.legend(fontsize=8)
    return figure


def _place(row: Row, x_name: str | None, numeric: Sequence[str]) -> Any:
    if x_name is None:
        return ""
    return float(row.values[x_name]) if x_name in numeric else row.values[x_name]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
