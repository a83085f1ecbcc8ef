"""What was measured of a group of workers, as one value that can be kept in a file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allstep.doctor.files import write_whole
from allstep.errors import UsageError
from allstep.plan import Cluster, Link, MeasuredCollective, check_positive, read_measured_collective

__all__ = ["Measurements", "PairTiming", "measurements_of", "read_measurements"]


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
    """What the planner needs to know of some workers, measured with all of them at work.

    Attributes:
        num_nodes, workers_per_node: of the workers that measured.
        device: "cpu" or "cuda".
        gemm_flops: 1/s of matrix products, of all workers together.
        copy_bytes_per_s: memory bandwidth of a worker, in bytes copied.
        bucketing_s_per_byte: seconds of a worker to copy a byte of gradient into its bucket.
        gradient_s: seconds of a worker to take up a gradient, whatever its size.
        intra, inter: what joins the workers of a host, and the hosts; None where there is no such.
        burst_s: by how many seconds a link may get ahead of its bandwidth after a pause.
        pairs: every pair of workers, one of each host for those between hosts.
        collectives: whole exchanges of buckets, by format and algorithm.

    Raises:
        UsageError: for a memory that doesn't copy; `cluster` checks the other numbers.
    """

    num_nodes: int
    workers_per_node: int
    device: str
    gemm_flops: float
    copy_bytes_per_s: float
    bucketing_s_per_byte: float
    gradient_s: float
    intra: Link | None
    inter: Link | None
    burst_s: float
    pairs: tuple[PairTiming, ...]
    collectives: tuple[MeasuredCollective, ...]

    def __post_init__(self) -> None:
        check_positive("copy_bytes_per_s", self.copy_bytes_per_s, "10e9 is 10 GB/s")

    def cluster(self, name: str = "measured here") -> Cluster:
        """These workers, for the planner."""
        link = self.intra or self.inter or Link(bandwidth_bps=8 * self.copy_bytes_per_s)
        return Cluster(
            name=name,
            num_nodes=self.num_nodes,
            workers_per_node=self.workers_per_node,
            intra=link,
            inter=self.inter,
            copy_bytes_per_s=self.copy_bytes_per_s,
            has_shared_memory=self.device == "cpu",
            burst_s=self.burst_s,
            bucketing_s_per_byte=self.bucketing_s_per_byte,
            gradient_s=self.gradient_s,
            collectives=self.collectives,
            source="measured",
        )

    def write(self, path: Path) -> None:
        """Writes a JSON file; readers see the whole of it or nothing.

        Raises:
            UsageError: if it can't be written.
        """
        try:
            write_whole(path, json.dumps(asdict(self), indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"`path` (={path}) can't be written: {error}.") from None


def read_measurements(path: Path, *, argument: str = "path") -> Measurements:
    """What `Measurements.write` has written.

    Args:
        path: of the file.
        argument: what the caller names it, for messages.

    Raises:
        UsageError: if the file can't be read, or holds something else.
    """
    try:
        found = measurements_of(json.loads(path.read_text(encoding="utf-8")))
        found.cluster()  # which checks the numbers
        return found
    except OSError as error:
        raise UsageError(f"`{argument}` (={path}) can't be read: {error}.") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # UsageError is a ValueError
        raise UsageError(f"`{argument}` (={path}) holds no measurements: {error}") from None


def measurements_of(table: Mapping[str, Any]) -> Measurements:
    """Measurements from their fields as plain data: lists for tuples, dicts for what they hold."""
    values = dict(table)
    for name in ("intra", "inter"):
        values[name] = None if values[name] is None else Link(**values[name])
    values["pairs"] = tuple(
        PairTiming(
            ranks=(pair["ranks"][0], pair["ranks"][1]),
            same_host=pair["same_host"],
            link=Link(**pair["link"]),
        )
        for pair in values["pairs"]
    )
    values["collectives"] = tuple(
        read_measured_collective(timed) for timed in values["collectives"]
    )
    return Measurements(**values)
