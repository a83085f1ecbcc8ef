"""What the predictions are worth: errors, the docs' table and the scatter plot."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["error", "headline", "write_report"]

DOCS = Path(__file__).parent.parent / "docs"
TABLE, PLOT = DOCS / "tables" / "predictions.md", DOCS / "guides" / "predictions.png"


def error(row: dict[str, Any]) -> float:
    """By how much of the measured time the predicted one is longer."""
    return row["predicted_s"] / row["measured_s"] - 1


def cells(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by network and model, those that exchange at every step."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if not row["policy"].startswith("local"):
            found.setdefault((row["link"], row["hosts"], row["model_mb"]), []).append(row)
    return found


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The numbers that the benchmark is about."""
    errors = [100 * abs(error(row)) for row in rows]
    regrets = []
    for cell in cells(rows).values():
        best_s = min(row["measured_s"] for row in cell)
        advised_s = next(row["measured_s"] for row in cell if row["is_advised"])
        regrets.append(100 * (advised_s / best_s - 1))
    return {
        "median_error_pct": statistics.median(errors),
        "worst_error_pct": max(errors),
        "advise_regret_pct": max(regrets),
        "advised_within_5_pct": sum(regret <= 5 for regret in regrets) / len(regrets),
        "num_steps_predicted": len(rows),
    }


def write_report(rows: Sequence[dict[str, Any]]) -> None:
    """The table and the picture of docs/guides/should_i_scale.md."""
    found = headline(rows)
    lines = [f"![Predicted and measured seconds of a step]({PLOT.name})\n"] if plot(rows) else []
    lines += [
        f"{len(rows)} steps: median error {found['median_error_pct']:.1f} %, worst"
        f" {found['worst_error_pct']:.1f} %. Of the policies that exchange at every step, the"
        f" advised one is within 5 % of the measured best in {found['advised_within_5_pct']:.0%}"
        f" of the cells (a model on a network), and at worst {found['advise_regret_pct']:.0f} %"
        " slower.\n",
        "| link | hosts | median error | worst error |",
        "|---|---|---|---|",
    ]
    for link, num_hosts in dict.fromkeys((row["link"], row["hosts"]) for row in rows):
        own = [abs(error(r)) for r in rows if (r["link"], r["hosts"]) == (link, num_hosts)]
        median = statistics.median(own)
        lines.append(f"| {link} | {num_hosts} | {median:.1%} | {max(own):.1%} |")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")


def plot(rows: Sequence[dict[str, Any]]) -> bool:
    """Predicted over measured; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install allstep[plot]")
        return False
    figure = Figure(figsize=(6, 5.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        measured = [1e3 * row["measured_s"] for row in own]
        axes.plot(measured, [1e3 * r["predicted_s"] for r in own], "o", alpha=0.7, label=name)
    ends = [1e3 * f(row["measured_s"] for row in rows) for f in (min, max)]
    axes.plot(ends, ends, "k-", linewidth=1)
    for factor in (0.85, 1.15):
        axes.plot(ends, [factor * end for end in ends], "k:", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_title("A training step (dotted: 15 % off)")
    axes.legend(fontsize="small")
    figure.savefig(PLOT, dpi=120)
    return True
