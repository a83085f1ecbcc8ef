"""Where commands print, and labelled values: a table on a terminal, plain lines elsewhere."""

import shutil
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

_SIZE_WITHOUT_TERMINAL = (100, 24)


def make_console() -> Console:
    """Standard output: as wide as the terminal, else as `COLUMNS` says, else 100 columns."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    width = shutil.get_terminal_size(_SIZE_WITHOUT_TERMINAL).columns
    return Console(highlight=False, width=width)


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
