"""What a sweep came to: a table, for people and programs, and a picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.cli.output_files import can_draw, new_figure, writing_errors
from allstep.cli.rows import finite, make_console, make_table
from allstep.cli.sweep_plan import Plan
from allstep.cli.trainings import Outcome, write_json
from allstep.files import write_table

_WIDE_RATIO = 8  # of numbers that a logarithmic axis shows better


@dataclass(frozen=True)
class Results:
    """All trainings, the best first, then those that have no score in the plan's order.

    Attributes:
        axes: the flags with several values.
        metric: what they are sorted by: "best NAME", or the last accuracy.
        outcomes: what became of each.
    """

    axes: Sequence[str]
    metric: str
    outcomes: Sequence[Outcome]


def make_results(plan: Plan, outcomes: Sequence[Outcome]) -> Results:
    """What a sweep came to so far."""
    recipe = plan.trainings[0].recipe
    sign = 1 if recipe.best_mode == "min" else -1
    ordered = sorted(outcomes, key=lambda o: math.inf if math.isnan(o.score) else sign * o.score)
    metric = f"best {recipe.best_metric}" if recipe.best_metric else "accuracy"
    return Results(list(plan.axes), metric, ordered)


def show(results: Results) -> None:
    """Prints the table."""
    console = make_console()
    metrics = next((list(_metrics(each)) for each in results.outcomes if each.report), [])
    best = [] if results.metric == "accuracy" else [results.metric]
    table = make_table(*results.axes, *best, *metrics, "steps", "run", left=["run"])
    for column in table.columns:
        column.overflow = "fold"
    for outcome in results.outcomes:
        training, found = outcome.training, _metrics(outcome)
        numbers = [f"{outcome.score:.4f}"] if best else []
        numbers += [f"{found[name]:.4f}" if found else "" for name in metrics]
        run = str(training.run_dir)
        if outcome.state != "finished":
            run = f"{run} {outcome.state}"
        steps = str((outcome.report or {}).get("num_steps", ""))
        table.add_row(*(training.values[name] for name in results.axes), *numbers, steps, run)
    console.print(table)
    for outcome in results.outcomes:
        if outcome.failure is not None:
            words = f"{outcome.training.name} failed: {outcome.failure}"
            console.print(words, soft_wrap=True, markup=False)


def _metrics(outcome: Outcome) -> Mapping[str, float]:
    """Of the last evaluation; empty without one."""
    return {} if outcome.report is None else outcome.report["metrics"]


def as_plain(results: Results) -> dict[str, Any]:
    """All of it for programs."""
    rows = [finite(_plain_row(outcome)) for outcome in results.outcomes]
    return {"metric": results.metric, "runs": rows}


def _plain_row(outcome: Outcome) -> dict[str, Any]:
    return {
        **outcome.training.values,
        "state": outcome.state,
        "score": outcome.score,
        **_metrics(outcome),
        "steps": (outcome.report or {}).get("num_steps"),
        "run": str(outcome.training.run_dir),
        "failure": outcome.failure,
    }


def write_files(folder: Path, results: Results) -> list[str]:
    """Writes table.json, table.csv and, if there is something to draw with, plot.png.

    Returns:
        The files' names.
    """
    plain = as_plain(results)
    write_json(folder / "table.json", plain)
    names = list(dict.fromkeys(name for row in plain["runs"] for name in row))
    with writing_errors(str(folder)):
        write_table(folder / "table.csv", names, plain["runs"])
        if not can_draw():
            return ["table.json", "table.csv"]
        _make_figure(results).savefig(folder / "plot.png", dpi=120)
    return ["table.json", "table.csv", "plot.png"]


def _make_figure(results: Results) -> Any:
    """The score over the first flag whose values are numbers; a line for each of the others'."""
    figure = new_figure()
    axes = figure.subplots()
    rows = [(o.training.values, o.score) for o in results.outcomes if math.isfinite(o.score)]
    numeric = [name for name in results.axes if all(_is_number(own[name]) for own, _ in rows)]
    x_name = next((name for name in (*numeric, *results.axes) if name != "seed"), None)
    lines: dict[str, list[tuple[Any, float]]] = {}
    for own, score in rows:
        others = [f"{k} {v}" for k, v in own.items() if k not in (x_name, "seed")]
        place = own.get(x_name or "", "")
        point = (float(place) if x_name in numeric else place, score)
        lines.setdefault(", ".join(others), []).append(point)
    for label, found in sorted(lines.items()):
        points = sorted(found)
        is_line = x_name in numeric and "seed" not in results.axes
        axes.plot(*zip(*points, strict=True), "o-" if is_line else "o", label=label or None)
    if x_name in numeric:
        places = [float(own[x_name]) for own, _ in rows]
        if places and min(places) > 0 and max(places) / min(places) >= _WIDE_RATIO:
            axes.set_xscale("log")
    axes.set(xlabel=x_name or "", ylabel=results.metric)
    axes.grid(alpha=0.3)
    if any(lines):
        axes.legend(fontsize=8)
    return figure


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
