"""What a panel of the demo says, apart from how it is shown."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bar:
    """A number to draw.

    Attributes:
        label: of the line; bars of the same label stand together.
        value: in the chart's unit.
        series: what kind of number it is, where there are several.
        spread: half the length of the error bar.
    """

    label: str
    value: float
    series: str = ""
    spread: float = 0.0


@dataclass(frozen=True)
class Chart:
    """Values and their unit.

    Attributes:
        is_log: show powers of ten.
        starts_at_zero: draw bars; else draw points, between the least and the largest value.
    """

    unit: str
    bars: Sequence[Bar]
    is_log: bool = False
    starts_at_zero: bool = True


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One of the demo's panels, finished or so far.

    Attributes:
        letter: a, b, c or d.
        title: the question.
        header: of the table's columns.
        rows: of the table; cells of what isn't measured yet are empty.
        chart: the same as a picture.
        notes: what a reader has to know to believe it.
        status: what is being measured now.
        conclusion: what follows; empty while measuring.
        numbers: for JSON.
    """

    letter: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    chart: Chart
    notes: Sequence[str] = ()
    status: str = ""
    conclusion: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
