"""Parses numbers with units and lists: 25M parameters, a link of 10gbit, workers 1,2,4."""

import math
import re
from collections.abc import Sequence

from allstep.errors import UsageError

_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z/]*)")
_LARGEST_COUNT = 2**63 - 1
_ROUNDING = 1e-12  # of 2.3M, whose product is no whole number
_BIT_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def parse_count(argument: str, text: str) -> int:
    """A count with an optional K, M, B (or G) or T.

    Raises:
        UsageError: if it is none, less than 1 or beyond 64 bits; names `argument`.

    >>> parse_count("params", "25M"), parse_count("params", "1.2b"), parse_count("params", "7")
    (25000000, 1200000000, 7)
    """
    count = _count(text)
    if count is None:
        raise UsageError(f"`{argument}` (={text}) must be a count such as 25M, 1.2B or 300000.")
    if count > _LARGEST_COUNT:
        raise UsageError(f"`{argument}` (={text}) is too large: at most {_LARGEST_COUNT:.3g}.")
    if round(count) < 1:
        raise UsageError(f"`{argument}` (={text}) must be at least 1.")
    if abs(count - round(count)) > _ROUNDING * count:
        raise UsageError(f"`{argument}` (={text}) must be a whole number.")
    return round(count)


def parse_bandwidth(argument: str, text: str) -> float:
    """Bits per second from a number with a unit.

    Raises:
        UsageError: if the unit is missing or unknown, or nothing gets through; names `argument`.

    >>> parse_bandwidth("link", "10gbit"), parse_bandwidth("link", "2.5 Gbit/s")
    (10000000000.0, 2500000000.0)
    """
    found = _NUMBER.fullmatch(text.strip().lower())
    unit = found[2].removesuffix("/s") if found else ""
    if found is None or unit not in _BIT_UNITS:
        raise UsageError(
            f"`{argument}` (={text}) must be bits per second such as 10gbit, 100mbit or 2.5gbit."
        )
    bandwidth_bps = float(found[1]) * _BIT_UNITS[unit]
    if not bandwidth_bps:
        raise UsageError(f"`{argument}` (={text}) must be above 0.")
    if bandwidth_bps == math.inf:
        raise UsageError(f"`{argument}` (={text}) is too large.")
    return bandwidth_bps


def parse_counts(argument: str, text: str) -> list[int]:
    """Counts separated by commas, sorted, without duplicates.

    Raises:
        UsageError: if one of them is no count, or less than 1; names `argument`.

    >>> parse_counts("workers", "8,1,2,2")
    [1, 2, 8]
    """
    parts = text.split(",")
    if None in map(_count, parts):
        raise UsageError(f"`{argument}` (={text}) must be numbers between commas, such as 1,2,4,8.")
    return sorted({parse_count(argument, part) for part in parts})


def parse_named_counts(argument: str, text: str, names: Sequence[str]) -> dict[str, int]:
    """Counts by name, such as the lengths of a mesh's axes.

    Raises:
        UsageError: if a name is unknown or there twice, or a count is none; names `argument`.

    >>> parse_named_counts("mesh", "data=4,tensor=2", ("data", "tensor"))
    {'data': 4, 'tensor': 2}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, is_given, count = part.partition("=")
        name = name.strip()
        if name not in names or not is_given:
            raise UsageError(
                f"`{argument}` (={text}) has no place for `{part.strip()}`; give"
                f" {','.join(f'{valid}=N' for valid in names)}."
            )
        if name in found:
            raise UsageError(f"`{argument}` (={text}) has `{name}` twice.")
        found[name] = parse_count(f"{argument}: {name}", count)
    return found


def _count(text: str) -> float | None:
    """The number, or None if it is none."""
    found = _NUMBER.fullmatch(text.strip().lower().replace("_", ""))
    if found is None or found[2] not in _COUNT_UNITS:
        return None
    return float(found[1]) * _COUNT_UNITS[found[2]]
