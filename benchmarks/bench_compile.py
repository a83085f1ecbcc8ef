"""What overlap a compiled model leaves: whole, in blocks, and under DDP, on a slow link.

    python benchmarks/bench_compile.py [--quick]

Two hosts are network namespaces of this machine with a link of 1 Gbit/s (network.py): needs root,
iproute2 and a C++ compiler. A transformer of eight blocks, 25 MB of gradients, is called as it is
written, compiled whole (`torch.compile(model)`) and block by block (`block.compile()`). The
backward pass of a whole compiled model is one node of autograd's graph: its gradients come all at
once at its end, so that nothing of their exchange runs beside it. DDP cuts the graph where its
buckets end.

Writes benchmarks/results/bench_compile.json (`--quick`: ..._quick.json) with steps as medians of
turns in the same processes.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from common import Estimate, estimate, print_headline, ratio, write_results
from compile_worker import VARIANTS
from network import ShapedHosts, UnavailableError
from rich.console import Console
from rich.table import Table

LINK_BPS = 1e9
WORKER = Path(__file__).with_name("compile_worker.py")


def measure(repeats: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder, ShapedHosts(2, LINK_BPS) as hosts:
        measured = Path(folder) / "seconds.measured"
        hosts.run([sys.executable, WORKER, measured, repeats], timeout_s=1_200)
        return dict(json.loads(measured.read_text()))


def show(seconds: dict[str, list[float]]) -> None:
    table = Table("", "step, ms", "v. alone, compiled alike", "v. DDP compiled")
    for variant in VARIANTS:
        alike = ratio(seconds[variant], seconds[f"alone {variant.split()[1]}"])
        against_ddp = ratio(seconds[variant], seconds["ddp whole"])
        table.add_row(
            variant,
            f"{1e3 * estimate(seconds[variant]).median:.0f}",
            *map(str, (alike, against_ddp)),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def headline(seconds: dict[str, list[float]]) -> dict[str, Estimate]:
    """Ratios above 1 say that blocks are faster."""
    return {
        "blocks_vs_whole": ratio(seconds["attach whole"], seconds["attach blocks"]),
        "blocks_vs_ddp": ratio(seconds["ddp whole"], seconds["attach blocks"]),
        "blocks_vs_eager": ratio(seconds["attach eager"], seconds["attach blocks"]),
        "blocks_vs_whole_alone": ratio(seconds["alone whole"], seconds["alone blocks"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repeats; about a minute")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    try:
        seconds = measure(7 if arguments.quick else 41)
    except UnavailableError as reason:
        sys.exit(f"skipped: {reason}")
    show(seconds)
    numbers = headline(seconds)
    intervals = {name: [e.median, e.low, e.high] for name, e in numbers.items()}
    name = f"bench_compile{'_quick' if arguments.quick else ''}"
    write_results(name, {"link_bps": LINK_BPS, **intervals, "seconds": seconds})
    print_headline(**{name: e.median for name, e in numbers.items()})


if __name__ == "__main__":
    main()
