"""What exact sums cost: a step with `compression="exact"` over the same step with float32 sums.

    python benchmarks/bench_exact.py [--quick] [--parts host 1gbit fashion lone]

Both take turns in the same processes of one thread each, as global batches of `allstep.steps`.
Where a process's tensors lie in memory moves a step of `fashion` by some per cent, so its processes
are started anew several times.

    host      two ranks of one host, 101 MB of gradients, little compute
    1gbit     two hosts, 25 MB of gradients, 110 ms of compute (needs root and iproute2)
    fashion   two ranks, the recipe `fashion`, micro-batches of 32
    lone      the same on one worker, which has nothing to exchange with float32

Keys: `bytes_vs_fp32` (that a step sends), `step_vs_fp32_host`, `step_vs_fp32_1gbit`,
`step_vs_fp32_fashion`, `lone_vs_fp32`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import estimate, print_headline, ratio, write_results
from exchange_worker import Point, run_point
from network import ShapedHosts, UnavailableError, run_on_one_host
from rich.console import Console
from rich.table import Table

PARTS = {
    "host": "step_vs_fp32_host",
    "1gbit": "step_vs_fp32_1gbit",
    "fashion": "step_vs_fp32_fashion",
    "lone": "lone_vs_fp32",
}
TARGETS = {
    "bytes_vs_fp32": 1.05,
    "step_vs_fp32_host": 1.10,
    "step_vs_fp32_1gbit": 1.10,
    "step_vs_fp32_fashion": 1.03,
    "lone_vs_fp32": 1.03,
}
REPEATS_OF_START = 4
MATRIX_BYTES = 1024 * 1024 * 4

Measured = dict[str, dict[str, Any]]


def point_of(part: str, repeats: int) -> Point:
    """What is measured of a net of square layers."""
    is_host = part == "host"
    num_layers = 24 if is_host else 6
    return Point(
        variants=("fp32", "exact"),
        gradient_bytes=num_layers * MATRIX_BYTES,
        num_layers=num_layers,
        compute_s=None if is_host else 0.11,
        updates=False,
        repeats=repeats,
        steps=16,  # in one of which units are looked at
        in_global_batches=True,
    )


def measure(part: str, repeats: int) -> Measured:
    """Compression -> seconds of a step in each repeat; bytes that a step sends."""
    with tempfile.TemporaryDirectory() as folder:
        if part == "1gbit":
            with ShapedHosts(2, 1e9) as hosts:
                return run_point(point_of(part, repeats), hosts.run, Path(folder))
        if part == "host":

            def run(command: list[object], *, timeout_s: float) -> None:
                run_on_one_host(2, command, timeout_s=timeout_s)

            return run_point(point_of(part, repeats), run, Path(folder))
        return measure_fashion(1 if part == "lone" else 2, repeats, Path(folder) / "steps.measured")


def measure_fashion(num_ranks: int, repeats: int, file: Path) -> Measured:
    """The same for the recipe, from several starts of the processes."""
    command = [sys.executable, Path(__file__).with_name("exact_worker.py"), file, REPEATS_OF_START]
    measured: Measured = {}
    for _ in range(repeats // 2):
        run_on_one_host(num_ranks, command, timeout_s=1800)
        for name, seconds in json.loads(file.read_text()).items():
            measured.setdefault(name, {"seconds": []})["seconds"] += seconds
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about two minutes on two cores")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, help="default: 13, quick 4")
    arguments = parser.parse_args()
    repeats = arguments.repeats or (4 if arguments.quick else 13)

    table = Table("", "fp32, ms", "exact, ms", "exact over fp32", "aim")
    keys: dict[str, float] = {}
    rows: dict[str, Any] = {}
    for part in arguments.parts:
        try:
            measured = measure(part, repeats)
        except UnavailableError as error:
            print(f"{part}: not measured, {error}")
            continue
        seconds = {name: row["seconds"] for name, row in measured.items()}
        price = ratio(seconds["exact"], seconds["fp32"])
        keys[PARTS[part]] = price.median
        steps_ms = [str(estimate([1e3 * s for s in seconds[n]])) for n in ("fp32", "exact")]
        table.add_row(part, *steps_ms, str(price), f"{TARGETS[PARTS[part]]}")
        rows[part] = {"measured": measured, "price": [price.low, price.median, price.high]}
        if part == "1gbit":  # in the memory of one host nothing is sent
            sent = {name: row["sent_bytes"] for name, row in measured.items()}
            keys["bytes_vs_fp32"] = sent["exact"] / sent["fp32"]
    Console().print(table)
    write_results("bench_exact", {"targets": TARGETS, **keys, "repeats": repeats, "rows": rows})
    print_headline(**keys)


if __name__ == "__main__":
    main()
