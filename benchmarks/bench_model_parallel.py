"""Nine layers that are divided over workers: forward and full backward, on one and on two.

    python benchmarks/bench_model_parallel.py [--quick]

Three nets, batch 96, workers of one thread each: two of this host, and two hosts whose link
carries 10 or 1 Gbit/s (network.py: needs root and iproute2; left out without them). One worker
alone and two together take turns in the same processes. `exposed` is the time that the slower
worker posts halos and waits for them.

The second table is a MODEL, nothing that was run: seconds of a step of a 200 x 200 x 3 net on 1 to
64 workers, from the bytes and products of the busiest worker, counted on paper, and from rates
that were measured here or are the paper's. It adds them up as if nothing overlapped.
Results: benchmarks/results/bench_model_parallel.json (with `--quick`: ..._quick.json).
"""

import argparse
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import estimate, print_headline, ratio, write_results
from model_parallel_counts import count, depth_for
from model_parallel_worker import NETS, run_point
from network import ShapedHosts, UnavailableError, run_on_one_host
from rich.console import Console
from rich.table import Table

LINKS: dict[str, float | None] = {"one host": None, "10 Gbit/s": 10e9, "1 Gbit/s": 1e9}
SIZES = (180e6, 680e6, 1.9e9, 3.0e9, 6.9e9, 11.2e9)
WORKERS = (1, 4, 9, 16, 36, 64)
TARGETS = {"speedup_2_workers_large": 1.7}
# A GTX 680 multiplies matrices at about 1 TFLOP/s; FDR InfiniBand carries 56 Gbit/s.
PAPER = {"flops_per_s": 1e12, "bytes_per_s": 56e9 / 8, "latency_s": 2e-6}


def measure(link: str, repeats: int) -> dict[str, Any]:
    """Every net on one link, with the ratios that are looked at."""
    rate_bps = LINKS[link]
    with tempfile.TemporaryDirectory() as folder:
        if rate_bps is None:
            measured = run_point(partial(run_on_one_host, 2), repeats, Path(folder))
        else:
            with ShapedHosts(2, rate_bps) as hosts:
                measured = run_point(hosts.run, repeats, Path(folder))
    for name in NETS:
        row = measured[name]
        row["alone_s"] = _sums(row["alone_forward_s"], row["alone_backward_s"])
        row["step_s"] = _sums(row["forward_s"], row["backward_s"])
        row["speedup"] = _values(ratio(row["alone_s"], row["step_s"]))
        row["forward_speedup"] = _values(ratio(row["alone_forward_s"], row["forward_s"]))
        row["exposed_share"] = _values(ratio(row["exposed_s"], row["step_s"]))
    return measured


def _sums(some: list[float], others: list[float]) -> list[float]:
    return [a + b for a, b in zip(some, others, strict=True)]


def _values(found: Any) -> list[float]:
    return [found.median, found.low, found.high]


def show(measured: dict[str, Any]) -> None:
    """What was measured."""
    table = Table(
        "link", "net", "parameters", "1 worker, ms", "2 workers, ms", "speed-up", "forward",
        "halo, MB", "exposed, ms",
    )  # fmt: skip
    for link, nets in measured.items():
        for name in NETS:
            row = nets[name]
            speedup = "{:.2f}x [{:.2f}, {:.2f}]".format(*row["speedup"])
            table.add_row(
                link,
                name,
                f"{row['num_parameters'] / 1e6:.1f} M",
                f"{1e3 * estimate(row['alone_s']).median:.1f}",
                f"{1e3 * estimate(row['step_s']).median:.1f}",
                speedup + (" loses" if row["speedup"][2] < 1 else ""),
                f"{row['forward_speedup'][0]:.2f}x",
                f"{row['sent_bytes'] / 1e6:.2f}",
                f"{1e3 * estimate(row['exposed_s']).median:.1f}",
            )
    _print(table)


def machines(measured: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Rates for the model: those measured here, and the paper's."""
    large = measured["one host"]["large"]
    flops_per_s = large["flops"] / estimate(large["alone_s"]).median
    rates = {
        f"this core, {link}": {"flops_per_s": flops_per_s, **nets["link"]}
        for link, nets in measured.items()
    }
    return rates | {"GTX 680, FDR": PAPER}


def model(rates: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each size and number of workers."""
    rows = []
    for size in SIZES:
        depth = depth_for(size)
        for num_workers in WORKERS:
            counts = count(depth, num_workers)
            row: dict[str, Any] = {"workers": num_workers, **vars(counts), "modelled": {}}
            for name, rate in rates.items():
                compute_s = counts.flops / rate["flops_per_s"]
                halo_s = counts.sent_bytes / rate["bytes_per_s"]
                halo_s += counts.messages * rate["latency_s"]
                row["modelled"][name] = {"step_s": compute_s + halo_s, "exposed_halo_s": halo_s}
            rows.append(row)
    return rows


def show_model(rows: list[dict[str, Any]]) -> None:
    """Speed-up over one worker, were there one with the memory for it."""
    names = list(rows[0]["modelled"])
    headings = [f"{name}: speed-up (halo, s)" for name in names]
    table = Table("parameters", "workers", *headings, title="MODEL, not measured")
    for row in rows:
        lone = next(r for r in rows if r["parameters"] == row["parameters"])
        cells = []
        for name in names:
            step = row["modelled"][name]
            gain = lone["modelled"][name]["step_s"] / step["step_s"]
            cells.append(f"{gain:.1f}x ({step['exposed_halo_s']:.3g})")
        table.add_row(f"{row['parameters'] / 1e9:.2f} B", str(row["workers"]), *cells)
    _print(table)


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repeats: a minute")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    measured: dict[str, Any] = {}
    for link in LINKS:
        try:
            measured[link] = measure(link, repeats=3 if arguments.quick else 15)
        except UnavailableError as reason:
            print(f"{link} is left out: {reason}")
    show(measured)
    rates = machines(measured)
    rows = model(rates)
    show_model(rows)
    headline = {
        f"speedup_2_workers_{name}": measured["one host"][name]["speedup"][0] for name in NETS
    }
    name = f"bench_model_parallel{'_quick' if arguments.quick else ''}"
    results = {"targets": TARGETS, **headline, "measured": measured, "rates": rates}
    write_results(name, {**results, "model": rows})
    print_headline(**headline)


if __name__ == "__main__":
    main()
