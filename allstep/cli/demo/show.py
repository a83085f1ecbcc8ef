"""Panels on a terminal, which grow as they are measured, or as plain text when they are done."""

from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from allstep.cli.demo.panel import Panel
from allstep.cli.rows import make_console

_NARROW = 60


class Screen:
    """Where panels are shown, one after the other."""

    def __init__(self) -> None:
        self.console = make_console()

    def say(self, text: str) -> None:
        """Prints a line between panels."""
        self.console.print(escape(text))

    def open(self) -> "_Frame":
        """A place for one panel, as a context manager."""
        return _Frame(self.console)


class _Frame:
    """Shows what a panel has so far, and at the end all of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False)

    def show(self, panel: Panel) -> None:
        """Shows it; without a terminal only what is finished."""
        if self._live is not None:
            self._live.update(_render(panel, self._console.width), refresh=True)
        elif not panel.status:
            self._console.print(_render(panel, self._console.width))

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def _render(panel: Panel, width: int) -> RenderableType:
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
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, title in enumerate(panel.header):
        table.add_column(title, justify="right" if number else "left")
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
