"""Output of commands, and labelled values: a table on a terminal, plain lines elsewhere."""

import shutil
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from allstep.files import json_text

_SIZE_WITHOUT_TERMINAL = (100, 24)


def make_console() -> Console:
    """A console on standard output, as wide as the terminal, else `COLUMNS`, else 100 columns."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    width = shutil.get_terminal_size(_SIZE_WITHOUT_TERMINAL).columns
    return Console(highlight=False, width=width)


def make_table(*titles: str, left: Iterable[str] = (), gap: int = 2) -> Table:
    """A table without lines, with numbers aligned right and words left.

    Args:
        titles: of the columns.
        left: those that have words.
        gap: between columns.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right")
    return table


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Prints each label with its value."""
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        for label, value in rows:
            table.add_row(f"[bold]{label}", value)
        console.print(table, soft_wrap=False)
    else:
        for label, value in rows:
            print(f"{label}: {value}")


def print_json(plain: Any, *, indent: int = 1) -> None:
    """Prints plain data for programs."""
    print(json_text(plain, indent), end="")
