"""Measurements of a group of workers, as one value that can be written to a file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allstep.errors import UsageError
from allstep.files import from_plain, read_json, write_json
from allstep.plan import Cluster, Link


@dataclass(frozen=True, kw_only=True)
class PairTiming:
    """Messages between two workers, one way.

    Attributes:
        ranks: of the two.
        same_host: whether they share one.
        link: latency and bandwidth of their messages.
    """

    ranks: tuple[int, int]
    same_host: bool
    link: Link


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Measurements of some workers, made while all of them work.

    Attributes:
        cluster: these workers, for the planner. Its links are the slowest of `pairs` inside a host
            and between hosts; a single worker's is its memory.
        gemm_flops: 1/s of matrix products, of all workers together.
        pairs: every pair of workers, one of each host for those between hosts.
    """

    cluster: Cluster
    gemm_flops: float
    pairs: tuple[PairTiming, ...]

    def write(self, path: Path) -> None:
        """Writes a JSON file, atomically.

        Raises:
            UsageError: if it can't be written.
        """
        try:
            write_json(path, asdict(self))
        except OSError as error:
            raise UsageError(f"`path` (={path}) can't be written: {error}.") from None


def read_measurements(path: Path, *, argument: str = "path") -> Measurements:
    """Reads the file of `Measurements.write`.

    Args:
        path: of the file.
        argument: what the caller names it, for messages.

    Raises:
        UsageError: if the file can't be read, or holds something else.
    """
    try:
        table = read_json(path)
        if not isinstance(table, Mapping) or not isinstance(table.get("cluster"), Mapping):
            raise UsageError("it is no file of `allstep.doctor.measure`.")
        return measurements_of(table)
    except OSError as error:
        raise UsageError(f"`{argument}` (={path}) can't be read: {error}.") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # UsageError is a ValueError
        raise UsageError(f"`{argument}` (={path}) holds no measurements: {error}") from None


def measurements_of(table: Mapping[str, Any]) -> Measurements:
    """Measurements from their fields as plain data: lists for tuples, dicts for what they hold."""
    found: Measurements = from_plain(Measurements, table)
    return found
