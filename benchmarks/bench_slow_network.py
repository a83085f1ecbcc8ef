"""Training steps on networks as slow as people have: every policy against DDP on Gloo.

    python benchmarks/bench_slow_network.py [--quick] [--parts 1gbit 100mbit curve hosts one_host]

Hosts are network namespaces of this machine on a switch, with shaped links (network.py): needs
root and iproute2, and says so if it lacks them. Each host is a process of one thread.

    1gbit     two hosts, 25 MB of gradients, real compute of 110 ms
    100mbit   the same where the wire is the limit, real compute of 50 ms
    curve     the same at 1 Gbit/s, with compute 0.25 to 4 times as long as fp32 is on the wire
    hosts     2, 4, 8, 16 hosts of 100 Mbit/s, 4 MB, with compute replaced by sleep
    one_host  two ranks that need no network, real compute of 50 ms

"Efficiency" is the time of the step without any exchange over the step's. A policy "loses" where
its step takes longer than that of allstep's plain fp32, beyond the interval. Parts are added to
benchmarks/results/bench_slow_network.json as they end (with `--quick`: ..._quick.json), so they can
be measured one by one; the headline is of all that are there. `--report` writes the table and
the plot of the docs. `--quick` measures the first two parts only, with few policies.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, circumstances, estimate, print_headline, ratio
from exchange_worker import Point, run_point
from network import ShapedHosts, UnavailableError, run_on_one_host
from rich.console import Console
from rich.table import Table

GBIT_BPS, LAYERS, GRADIENT_BYTES = 1e9, 6, 6 * 1024 * 1024 * 4
SMALL_BPS, SMALL_LAYERS, SMALL_BYTES = 100e6, 16, 16 * 256 * 256 * 4
PEERS = ("alone", "ddp")
DOCS = Path(__file__).parent.parent / "docs"
TABLE, PLOT = DOCS / "tables" / "slow_network.md", DOCS / "guides" / "slow_network.svg"
HEADINGS = {
    "1gbit": "Two hosts, 25 MB of gradients, 110 ms of compute",
    "100mbit": "Two hosts, 25 MB of gradients, 50 ms of compute",
    "curve": "Compute : wire, two hosts, 25 MB at 1 Gbit/s",
    "hosts": "Hosts, 4 MB at 100 Mbit/s, 0.34 s of compute",
    "one_host": "Two ranks of one host, 25 MB, 50 ms of compute",
}
ALL_POLICIES = (
    "fp32", "auto", "bf16", "fp16", "int8", "powersgd 4", "topk 1%", "exact",
    "fp32 stale 1", "fp16 stale 1", "int8 stale 1", "local H=16", "diloco H=16",
)  # fmt: skip
QUICK_POLICIES = ("fp32", "int8", "fp16 stale 1", "local H=16")
QUICK_PARTS = ("1gbit", "100mbit")
TARGETS = {
    "speedup_1gbit": 2.1,
    "share_of_limit_1gbit": 0.9,
    "int8_speedup_100mbit": 3.0,
    "local_sgd_speedup_100mbit": 10.0,
    "auto_vs_best_min": 0.95,
}

Rows = dict[str, dict[str, Any]]


def fixed_choices(gradient_bytes: int, *, quick: bool) -> list[str]:
    """What `auto` could have chosen: algorithms and sizes of buckets; none where it is left out."""
    algorithms = () if quick else ("native", "ring", "halving_doubling")
    return [f"{name}/{gradient_bytes // part}" for name in algorithms for part in (16, 4, 1)]


def points(part: str, quick: bool) -> dict[str, tuple[int, float | None, Point]]:
    """Label -> number of hosts, bits per second of a link (None: one host), what to measure."""
    variants = PEERS + (QUICK_POLICIES if quick else ALL_POLICIES)
    repeats, steps = (2, 2) if quick else (7, 4)
    real = partial(
        Point, gradient_bytes=GRADIENT_BYTES, num_layers=LAYERS, repeats=repeats, steps=steps
    )
    with_fixed = (*variants, *fixed_choices(GRADIENT_BYTES, quick=quick))
    if part == "1gbit":
        repeats = 3 if quick else 15
        point = real(variants=with_fixed, compute_s=0.11, repeats=repeats)
        return {"1 Gbit/s": (2, GBIT_BPS, point)}
    if part == "100mbit":
        point = real(variants=with_fixed, compute_s=0.05, steps=1)
        return {"100 Mbit/s": (2, GBIT_BPS / 10, point)}
    if part == "one_host":
        return {"one host": (2, None, real(variants=variants, compute_s=0.05))}
    if part == "curve":
        wire_s = GRADIENT_BYTES * 8 / GBIT_BPS
        ratios = (0.25, 1.0, 4.0) if quick else (0.25, 0.5, 1.0, 2.0, 4.0)
        point = real(variants=with_fixed, steps=2)
        return {f"{r:g}": (2, GBIT_BPS, replace(point, compute_s=r * wire_s)) for r in ratios}
    assert part == "hosts"
    point = Point(
        variants=(*variants, *fixed_choices(SMALL_BYTES, quick=quick)),
        gradient_bytes=SMALL_BYTES,
        num_layers=SMALL_LAYERS,
        compute="sleep",
        compute_s=SMALL_BYTES * 8 / SMALL_BPS,
        bucket_bytes=SMALL_BYTES // 4,
        repeats=repeats,
        steps=2,
    )
    return {str(n): (n, SMALL_BPS, point) for n in ((2, 4) if quick else (2, 4, 8, 16))}


def measure(num_hosts: int, rate_bps: float | None, point: Point) -> Rows:
    """One point; variant -> what is written about it."""
    with tempfile.TemporaryDirectory() as folder:
        if rate_bps is None:
            run: Callable[..., None] = partial(run_on_one_host, num_hosts)
            measured = run_point(point, run, Path(folder))
        else:
            with ShapedHosts(num_hosts, rate_bps) as hosts:
                measured = run_point(point, hosts.run, Path(folder))
    seconds = {name: row["seconds"] for name, row in measured.items()}
    return {name: row_of(name, seconds, measured[name]["sent_bytes"], rate_bps) for name in seconds}


def row_of(
    name: str, seconds: dict[str, list[float]], sent_bytes: int | None, rate_bps: float | None
) -> dict[str, Any]:
    """A variant's step, and its ratios with the interval of each."""
    step = seconds[name]
    row: dict[str, Any] = {"sent_bytes": sent_bytes, "step_s": interval(estimate(step))}
    row["efficiency"] = interval(ratio(seconds["alone"], step))
    row["speedup_vs_ddp"] = interval(ratio(seconds["ddp"], step))
    row["time_vs_fp32"] = interval(ratio(step, seconds["fp32"]))
    row["loses"] = row["time_vs_fp32"][1] > 1
    if sent_bytes is not None and rate_bps is not None:
        wire_s = sent_bytes * 8 / rate_bps
        limits = [max(alone_s, wire_s) for alone_s in seconds["alone"]]
        row["share_of_limit"] = interval(ratio(limits, step))
    fixed = {n: estimate(s).median for n, s in seconds.items() if "/" in n}
    if name == "auto" and fixed:
        row["best_fixed"] = min(fixed, key=lambda n: fixed[n])
        row["vs_best_fixed"] = interval(ratio(seconds[row["best_fixed"]], step))
    return row


def interval(found: Any) -> list[float]:
    """Median, lower and upper end."""
    return [found.median, found.low, found.high]


def show(part: str, label: str, rows: Rows) -> None:
    """A point's table."""
    table = Table("", "step, ms", "efficiency", "v. DDP", "v. fp32", "", title=f"{part}: {label}")
    for name, row in rows.items():
        step_ms = "{:.1f} [{:.1f}, {:.1f}]".format(*(1e3 * s for s in row["step_s"]))
        ratios = ["{:.2f}x [{:.2f}, {:.2f}]".format(*row["speedup_vs_ddp"])]
        ratios += ["{:.2f} [{:.2f}, {:.2f}]".format(*row["time_vs_fp32"])]
        loses = "loses" if row["loses"] and name not in PEERS else ""
        table.add_row(name, step_ms, f"{row['efficiency'][0]:.0%}", *ratios, loses)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def headline(parts: dict[str, Any]) -> dict[str, float]:
    """The numbers that the benchmark is about, of the parts that are there."""
    keys = {}
    if "1gbit" in parts:
        row = parts["1gbit"]["points"]["1 Gbit/s"]["fp16 stale 1"]
        keys["speedup_1gbit"] = row["speedup_vs_ddp"][0]
        keys["share_of_limit_1gbit"] = row["share_of_limit"][0]
    if "100mbit" in parts:
        rows = parts["100mbit"]["points"]["100 Mbit/s"]
        keys["int8_speedup_100mbit"] = rows["int8"]["speedup_vs_ddp"][0]
        keys["local_sgd_speedup_100mbit"] = rows["local H=16"]["speedup_vs_ddp"][0]
    against_best = [
        rows["auto"]["vs_best_fixed"][0]
        for part in parts.values()
        for rows in part["points"].values()
        if "vs_best_fixed" in rows.get("auto", {})
    ]
    if against_best:
        keys["auto_vs_best_min"] = min(against_best)
    return keys


def worst_cases(parts: dict[str, Any]) -> list[str]:
    """For every policy where it does worst against plain fp32."""
    cases: dict[str, list[tuple[float, str]]] = {}
    for part, measured in parts.items():
        for label, rows in measured["points"].items():
            for name, row in rows.items():
                if name not in (*PEERS, "fp32") and "/" not in name:
                    cases.setdefault(name, []).append((row["time_vs_fp32"][0], f"{part} {label}"))
    return [
        "{}: {:.2f} times fp32's step ({})".format(name, *max(found))
        for name, found in cases.items()
    ]


def read_parts(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["parts"] if path.exists() else {}


def write_report(parts: dict[str, Any]) -> None:
    """The table and the plot of docs/guides/slow_network.md."""
    lines = [f"![Efficiency, hollow where a policy loses]({PLOT.name})"] if plot(parts) else []
    for part in (part for part in HEADINGS if part in parts):
        measured = parts[part]
        columns = list(measured["points"])
        lines += [f"\n### {HEADINGS[part]}\n", "| | " + " | ".join(columns) + " |"]
        lines += ["|---|" + "---|" * len(columns)]
        names = [n for n in measured["points"][columns[0]] if n != "alone" and "/" not in n]
        for name in names:
            cells = [_cell(rows[name]) for rows in measured["points"].values()]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    worst = [f"- {case}" for case in worst_cases(parts)]
    lines += ["\n### Where each does worst, against plain fp32\n", *worst]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines).lstrip() + "\n")


def _cell(row: dict[str, Any]) -> str:
    loses = " ▼" if row["loses"] else ""
    return f"{row['efficiency'][0]:.0%}, {row['speedup_vs_ddp'][0]:.2f}x{loses}"


def plot(parts: dict[str, Any]) -> bool:
    """Efficiency over compute : wire and over hosts; False without matplotlib or these parts."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install allstep[plot]")
        return False
    shown = [part for part in ("curve", "hosts") if part in parts]
    if not shown:
        return False
    figure = Figure(figsize=(5.5 * len(shown), 4.5), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        points = parts[part]["points"]
        xs = [float(label) for label in points]
        names = [n for n in next(iter(points.values())) if n != "alone" and "/" not in n]
        for name in names:
            ys = [100 * rows[name]["efficiency"][0] for rows in points.values()]
            (line,) = axes.plot(xs, ys, label=name, linestyle="--" if name == "ddp" else "-")
            for x, y, rows in zip(xs, ys, points.values(), strict=True):
                face = "white" if rows[name]["loses"] else line.get_color()
                axes.plot(x, y, "o", color=line.get_color(), markerfacecolor=face)
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.set_xlabel(HEADINGS[part])
        axes.set_ylabel("efficiency, %")
        axes.set_ylim(0, None)
    axes.legend(fontsize="small", ncols=2)
    with rc_context({"svg.hashsalt": PLOT.name}):  # the same picture is the same file
        figure.savefig(PLOT, metadata={"Date": None})
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=HEADINGS, help="default: all; quick: two")
    parser.add_argument("--points", nargs="+", help="of these parts only such as `2` of `hosts`")
    parser.add_argument("--quick", action="store_true", help="two parts, few policies; a minute")
    parser.add_argument("--report", action="store_true", help="only write the docs' table and plot")
    arguments = parser.parse_args()
    path = RESULTS / f"bench_slow_network{'_quick' if arguments.quick else ''}.json"
    if arguments.report:
        write_report(read_parts(path))
        return
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    try:
        for part in arguments.parts or (QUICK_PARTS if arguments.quick else HEADINGS):
            measure_part(part, path, arguments.points, quick=arguments.quick)
    except UnavailableError as reason:
        sys.exit(f"skipped: {reason}")
    parts = read_parts(path)
    print("worst cases:", *worst_cases(parts), sep="\n  ")
    print_headline(**headline(parts))


def measure_part(part: str, path: Path, labels: Sequence[str] | None, *, quick: bool) -> None:
    """Measures a part's points and adds each to the results as it ends."""
    everything = points(part, quick)
    old = read_parts(path).get(part, {"points": {}, "circumstances": {}})
    measured: dict[str, Rows] = old["points"]
    for label, (num_hosts, rate_bps, point) in everything.items():
        if labels is not None and label not in labels:
            continue
        measured[label] = measure(num_hosts, rate_bps, point)
        old["circumstances"][label] = circumstances()
        show(part, label, measured[label])
        in_order = {label: measured[label] for label in everything if label in measured}
        mine = {"circumstances": old["circumstances"], "points": in_order}
        parts = read_parts(path) | {part: mine}
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps({"targets": TARGETS, **headline(parts), "parts": parts}, indent=2)
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
