"""Panels as pictures."""

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from allstep.cli.demo.panel import Bar, Chart, Panel
from allstep.cli.output_files import new_figure


def draw(panel: Panel, path: Path) -> None:
    """Writes a panel's picture."""
    make_figure(panel).savefig(path, dpi=100)


def make_figure(panel: Panel) -> Any:
    """A panel's values, with its conclusion beneath."""
    labels = list(dict.fromkeys(bar.label for bar in panel.chart.bars))
    series = list(dict.fromkeys(bar.series for bar in panel.chart.bars))
    height = 1.8 + 0.25 * len(labels) * (1 + len(series))
    figure = new_figure(8, height)
    axes = figure.subplots()
    for number, name in enumerate(series):
        _draw_series(axes, panel.chart, name, labels, (number + 0.5) / len(series) - 0.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(x=0.12)
    axes.set_title(fill(panel.title, 80), fontsize=10, fontweight="bold")
    axes.set_xlabel(f"{panel.chart.unit}\n\n{fill(panel.conclusion, 95)}", fontsize=9)
    if len(series) > 1:
        axes.legend(fontsize=8)
    return figure


def _draw_series(axes: Any, chart: Chart, series: str, labels: list[str], offset: float) -> None:
    bars = [bar for bar in chart.bars if bar.series == series]
    num_series = len({bar.series for bar in chart.bars})
    places = [labels.index(bar.label) + 0.8 * offset for bar in bars]
    values = [bar.value for bar in bars]
    if chart.is_log:
        axes.set_xscale("symlog", linthresh=_smallest(chart) / 10)
    if not chart.starts_at_zero:
        _draw_points(axes, bars, places)
        return
    drawn = axes.barh(
        places,
        values,
        height=0.75 / num_series,
        xerr=[bar.spread for bar in bars] if any(bar.spread for bar in bars) else None,
        label=series or None,
    )
    axes.bar_label(drawn, [_text(value) for value in values], padding=3, fontsize=8)


def _draw_points(axes: Any, bars: Sequence[Bar], places: Sequence[float]) -> None:
    """Points on an axis from the least value to the largest, where bars would all look alike."""
    values = [bar.value for bar in bars]
    axes.errorbar(values, places, xerr=[bar.spread for bar in bars], fmt="o", capsize=3)
    for value, place in zip(values, places, strict=True):
        axes.annotate(
            _text(value),
            (value, place),
            (0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )


def _smallest(chart: Chart) -> float:
    """The least value that a logarithmic axis has to tell from 0, a power of ten."""
    positive = [bar.value for bar in chart.bars if bar.value > 0]
    return 10.0 ** math.floor(math.log10(min(positive, default=1.0)))


def _text(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 0.1 else f"{value:,.4g}"
