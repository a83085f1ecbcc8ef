"""Plots the headlines of all benchmark runs that were kept.

    python benchmarks/history.py

Reads benchmarks/results/history.jsonl, to which every benchmark appends its last line, and writes
docs/images/benchmark_history.png: a panel for each headline, its runs in the order of their dates,
a colour for each processor. Quick runs are left out.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from common import HISTORY
from matplotlib import pyplot as plt

PLOT = Path(__file__).parents[1] / "docs" / "images" / "benchmark_history.png"
COLUMNS = 3


def read(path: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(benchmark, headline) -> its runs by date; headlines of one run only are left out."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["date"]):
        script, *arguments = run["command"].split()
        if "--quick" in arguments:
            continue
        for key, value in run["headline"].items():
            found[script.removesuffix(".py"), key].append({**run, "value": value})
    return {key: runs for key, runs in found.items() if len(runs) > 1}


def plot(series: dict[tuple[str, str], list[dict[str, Any]]], path: Path) -> None:
    processors = sorted({r["machine"]["processor"] for runs in series.values() for r in runs})
    colours = {name: f"C{index}" for index, name in enumerate(processors)}
    rows = math.ceil(len(series) / COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(11, 2.3 * rows), squeeze=False)
    for axis, ((bench, key), runs) in zip(axes.flat, series.items(), strict=False):
        values = [run["value"] for run in runs]
        axis.plot(range(len(runs)), values, color="0.8", zorder=1)
        marks = [colours[run["machine"]["processor"]] for run in runs]
        axis.scatter(range(len(runs)), values, c=marks, zorder=2)
        axis.set_title(f"{bench}\n{key}", fontsize=8)
        axis.set_xticks(range(len(runs)), [run["date"][2:10] for run in runs], rotation=90)
        axis.tick_params(labelsize=6)
        axis.set_ylim(0, 1.15 * max(values))
    for axis in list(axes.flat)[len(series) :]:
        axis.axis("off")
    handles = [
        plt.Line2D([], [], marker="o", linestyle="", color=colour, label=name)
        for name, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    plot(read(HISTORY), PLOT)
    print(PLOT)
