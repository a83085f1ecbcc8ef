"""Labelled values: a table on a terminal, plain lines elsewhere."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

__all__ = ["print_rows"]


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
