"""Files that are complete or absent, even if a process ends while it writes; plain data in them.

Plain data are what JSON can hold: numbers, booleans, strings, None, and lists and dicts of these.
"""

import csv
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a draft that replaces the file on exit; no reader sees half of a file.

    An error inside leaves the earlier file as it was.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.draft")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a text file; readers see the complete file or none."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, plain: Any, indent: int | None = 2) -> None:
    """Writes plain data, other objects as their `str`; readers see the complete file or none."""
    write_whole(path, json.dumps(plain, indent=indent, default=str) + "\n")


def finite(plain: Any) -> Any:
    """Plain data with None in place of NaN and infinities, which JSON lacks.

    >>> finite({"losses": [0.5, math.nan]})
    {'losses': [0.5, None]}
    """
    if isinstance(plain, dict):
        return {key: finite(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [finite(value) for value in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def json_text(plain: Any, indent: int | None = 2) -> str:
    """Plain data as a text for other programs, which know neither NaN nor infinity; see `finite`.

    >>> print(json_text({"losses": [0.5, math.nan]}, indent=None), end="")
    {"losses": [0.5, null]}
    """
    return json.dumps(finite(plain), indent=indent, default=str, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """The plain data in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def from_plain(kind: Any, plain: Any) -> Any:
    """The inverse of `dataclasses.asdict`, also for data that went through JSON.

    Args:
        kind: the type to build: a dataclass, or a tuple, list, dict or optional of these; a path is
            a string in plain data.
        plain: its plain data.

    Raises:
        TypeError, AttributeError: if the data lack the fields of the dataclass.

    >>> from dataclasses import asdict, dataclass
    >>> @dataclass
    ... class Point:
    ...     at: tuple[float, float]
    ...     next: "tuple[int, ...] | None" = None
    ...     file: Path | None = None
    >>> from_plain(Point, json.loads(json.dumps(asdict(Point((0.5, 1.0), (1, 2))))))
    Point(at=(0.5, 1.0), next=(1, 2), file=None)
    >>> from_plain(Point, {"at": [0.5, 1.0], "file": "a/b"}).file
    PosixPath('a/b')
    """
    if is_dataclass(kind):
        hints = _hints(kind)
        fields = {name: from_plain(hints.get(name), value) for name, value in plain.items()}
        return kind(**fields)  # type: ignore[operator]
    inner = get_args(kind)
    if NoneType in inner:
        return None if plain is None else from_plain(inner[inner[0] is NoneType], plain)
    if kind is Path:
        return Path(plain)
    if isinstance(plain, dict) and inner:
        return {key: from_plain(inner[1], value) for key, value in plain.items()}
    if isinstance(plain, list | tuple) and inner:
        is_pair = len(inner) == len(plain) and Ellipsis not in inner
        items = zip(inner if is_pair else inner[:1] * len(plain), plain, strict=True)
        found = [from_plain(each, value) for each, value in items]
        return tuple(found) if get_origin(kind) is tuple else found
    return plain


_hints: Any = cache(get_type_hints)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a CSV file; readers see the complete file or none.

    Args:
        path: the file.
        columns: names of the columns, in order.
        rows: for each row, column name -> value; a missing value leaves its cell empty.
    """
    with replacing(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
