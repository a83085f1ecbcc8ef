"""A sweep's results: a table for people and for programs, and a plot."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allstep.cli.output_files import can_draw, new_figure, writing_errors
from allstep.cli.rows import make_console, make_table
from allstep.cli.trainings import Outcome, write_json
from allstep.files import finite, write_table

_WIDE_RATIO = 8  # of numbers that a logarithmic axis shows better


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """A sweep's trainings, the best first; those without a score last, in the plan's order."""
    sign = 1 if outcomes[0].training.recipe.best_mode == "min" else -1
    return sorted(outcomes, key=lambda o: math.inf if math.isnan(o.score) else sign * o.score)


def _metric_of(outcomes: Sequence[Outcome]) -> str:
    """The metric of the ranking: "best NAME", or the last accuracy."""
    name = outcomes[0].training.recipe.best_metric
    return f"best {name}" if name else "accuracy"


def show(outcomes: Sequence[Outcome]) -> None:
    """Prints the table."""
    console = make_console()
    metric = _metric_of(outcomes)
    metrics = next((list(_metrics(each)) for each in outcomes if each.report), [])
    best = [] if metric == "accuracy" else [metric]
    table = make_table(*outcomes[0].training.values, *best, *metrics, "steps", "run", left=["run"])
    for column in table.columns:
        column.overflow = "fold"
    for outcome in outcomes:
        training, found = outcome.training, _metrics(outcome)
        numbers = [f"{outcome.score:.4f}"] if best else []
        numbers += [f"{found[name]:.4f}" if found else "" for name in metrics]
        run = str(training.run_dir)
        if outcome.state != "finished":
            run = f"{run} {outcome.state}"
        steps = str((outcome.report or {}).get("num_steps", ""))
        table.add_row(*training.values.values(), *numbers, steps, run)
    console.print(table)
    for outcome in outcomes:
        if outcome.failure is not None:
            words = f"{outcome.training.name} failed: {outcome.failure}"
            console.print(words, soft_wrap=True, markup=False)


def _metrics(outcome: Outcome) -> Mapping[str, float]:
    """The metrics of the last evaluation; empty without one."""
    found = {} if outcome.report is None else outcome.report["metrics"]
    return {name: math.nan if value is None else value for name, value in found.items()}


def as_plain(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The whole table as plain data."""
    rows = [finite(_plain_row(outcome)) for outcome in outcomes]
    return {"metric": _metric_of(outcomes), "runs": rows}


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


def write_files(folder: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Writes table.json, table.csv and, if matplotlib is installed, plot.png.

    Returns:
        The files' names.
    """
    plain = as_plain(outcomes)
    write_json(folder / "table.json", plain)
    names = list(dict.fromkeys(name for row in plain["runs"] for name in row))
    with writing_errors(str(folder)):
        write_table(folder / "table.csv", names, plain["runs"])
        if not can_draw():
            return ["table.json", "table.csv"]
        _make_figure(outcomes).savefig(folder / "plot.png", dpi=120)
    return ["table.json", "table.csv", "plot.png"]


def _make_figure(outcomes: Sequence[Outcome]) -> Any:
    """A figure of the score over the first numeric flag, with a line for each other setting."""
    figure = new_figure()
    axes = figure.subplots()
    rows = [(o.training.values, o.score) for o in outcomes if math.isfinite(o.score)]
    names = list(outcomes[0].training.values)
    numeric = [name for name in names if all(_is_number(own[name]) for own, _ in rows)]
    x_name = next((name for name in (*numeric, *names) if name != "seed"), None)
    lines: dict[str, list[tuple[Any, float]]] = {}
    for own, score in rows:
        others = [f"{k} {v}" for k, v in own.items() if k not in (x_name, "seed")]
        place = own.get(x_name or "", "")
        point = (float(place) if x_name in numeric else place, score)
        lines.setdefault(", ".join(others), []).append(point)
    for label, found in sorted(lines.items()):
        points = sorted(found)
        is_line = x_name in numeric and "seed" not in names
        axes.plot(*zip(*points, strict=True), "o-" if is_line else "o", label=label or None)
    if x_name in numeric:
        places = [float(own[x_name]) for own, _ in rows]
        if places and min(places) > 0 and max(places) / min(places) >= _WIDE_RATIO:
            axes.set_xscale("log")
    axes.set(xlabel=x_name or "", ylabel=_metric_of(outcomes))
    axes.grid(alpha=0.3)
    if any(lines):
        axes.legend(fontsize=8)
    return figure


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
