"""A panel for a terminal of any width."""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from allstep.cli.demo.panel import Panel
from allstep.cli.rows import make_table

_NARROW = 60


def render(panel: Panel, width: int) -> RenderableType:
    """What a panel has so far, in so many columns."""
    parts: list[RenderableType] = [Text(f"{panel.letter}. {panel.title}", style="bold")]
    parts.append(Padding(_table(panel) if width >= _NARROW else _list(panel), (0, 0, 0, 3)))
    parts += [Text(note, style="dim") for note in panel.notes]
    if panel.status:
        parts.append(Text(f"... {panel.status}", style="dim"))
    if panel.conclusion:
        parts.append(Text(panel.conclusion, style="bold"))
    parts.append(Text())
    return Group(*parts)


def _table(panel: Panel) -> Table:
    table = make_table(*panel.header, left=panel.header[:1])
    for row in panel.rows:
        table.add_row(*map(escape, row))
    return table


def _list(panel: Panel) -> Group:
    """A line for each cell, for narrow terminals."""
    lines = []
    for name, *cells in panel.rows:
        lines.append(Text(name, style="bold"))
        pairs = zip(panel.header[1:], cells, strict=True)
        lines += [Text(f"  {title}: {cell}") for title, cell in pairs if cell]
    return Group(*lines)
