"""What the benchmarks share: fair timing, intervals, and results that say where they come from."""

import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import allstep

RESULTS = Path(__file__).parent / "results"
HISTORY = RESULTS / "history.jsonl"


@dataclass(frozen=True)
class Estimate:
    """A median and the interval that holds the true one with about 95 % confidence."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def excess(self) -> "Estimate":
        """Of a ratio, by how many per cent it is above 1.

        >>> Estimate(1.5, 1.25, 1.75).excess()
        Estimate(median=50.0, low=25.0, high=75.0)
        """
        return Estimate(*(100 * (r - 1) for r in (self.median, self.low, self.high)))


def estimate(values: Sequence[float]) -> Estimate:
    """Median and its 95 % interval from order statistics; assumes no distribution.

    The interval is between the j-th smallest and j-th largest value, with the largest j for
    which a fair coin thrown n times shows fewer than j heads in at most 2.5 % of the cases.

    >>> estimate([3.0, 1.0, 2.0, 5.0, 4.0, 7.0, 6.0])
    Estimate(median=4.0, low=1.0, high=7.0)
    """
    ordered = sorted(values)
    n = len(ordered)
    below, term, j = 0.0, 0.5**n, 0
    while below + term <= 0.025:
        below += term
        term *= (n - j) / (j + 1)
        j += 1
    j = max(j, 1)
    return Estimate(statistics.median(ordered), ordered[j - 1], ordered[n - j])


def ratio(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """Values over base, repeat by repeat, so that a slow moment of the machine cancels.

    >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]).median
    2.0
    """
    return estimate([value / other for value, other in zip(values, base, strict=True)])


def interleave(
    variants: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warmups: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each variant in each repeat; all of them take turns, in alternating order."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(-warmups, repeats):
        names = list(variants) if repeat % 2 else list(reversed(variants))
        for name in names:
            start_s = clock()
            variants[name]()
            if repeat >= 0:
                seconds[name].append(clock() - start_s)
    return seconds


def keep_heap() -> None:
    """Makes glibc keep released memory, so that a step does not pay for new pages.

    It gives blocks beyond 32 MB back to the system at every release; allocators that are made
    for training do not.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: no block of its own mapping
    libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink


def run_worker(measure: Callable[[allstep.Communicator], Any], file: Path) -> None:
    """What a worker with one thread measures, written by rank 0 as JSON."""
    torch.set_num_threads(1)
    with allstep.init(device="cpu") as comm:
        measured = measure(comm)
        if comm.rank == 0:
            file.write_text(json.dumps(measured))
        comm.barrier()


def circumstances() -> dict[str, Any]:
    """Machine, versions and date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": {
            "processor": _processor(),
            "num_cpus": len(os.sched_getaffinity(0)),
            "num_threads": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],  # one per busy core, this benchmark included
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()}",
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "numpy", "allstep")},
        },
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def write_results(name: str, results: Mapping[str, Any]) -> Path:
    """Writes `results/<name>.json` with the circumstances."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**circumstances(), **results}, indent=2) + "\n")
    return path


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The runs that a file of JSON lines has, none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_headline(**numbers: float) -> None:
    """The last line: one JSON object with the numbers that the benchmark is about.

    They are also appended to `results/history.jsonl`, which `history.py` plots.
    """
    rounded = {name: float(f"{value:.4g}") for name, value in numbers.items()}
    with HISTORY.open("a") as history:
        history.write(json.dumps({**circumstances(), "headline": rounded}) + "\n")
    print(json.dumps(rounded), flush=True)
