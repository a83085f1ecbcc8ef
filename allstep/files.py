"""Files that are whole or not there, also where a process ends while it writes."""

import csv
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a draft to write inside, which becomes the file; readers see all of it or none.

    An error inside leaves what was there before.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.draft")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a text file; readers see the whole of it or nothing."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a CSV file; readers see the whole of it or nothing.

    Args:
        path: the file.
        columns: their names, in order.
        rows: values by column; a cell is empty where a row has none.
    """
    with replacing(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
