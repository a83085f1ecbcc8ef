"""Steps, optimizers, exact sums, wire formats and batch norm on a real GPU.

    python benchmarks/bench_gpu.py [--quick] [--parts step optim ...] [--device cpu --quick]

    step        a training step bare, under `attach` and under DDP (with gradients that are views
                of buckets), of one worker over NCCL: ResNet-50 (batch 256, 224 x 224, channels
                last, bf16), BERT-large (32 sequences of 128, bf16), and 5 GRUs x 3,000 units x
                100 steps (batch 16, TF32). "attach" does what it does among several workers;
                "attach, lone" is what a single one has
    shared      two workers on the one GPU over NCCL, smaller batches: their messages take the
                network's way through the host, so what counts is the host's time, not the speed
    optim       LAMB, LARS and an AdamW of ours over BERT-large's parameters, against torch's
    exact       `compression="exact"` against plain sums, in global batches of two micro-batches
    formats     what each wire format does to a bucket of 25 MiB, without what travels
    batch_norm  across the two workers of a GPU, against SyncBatchNorm
    local       bench_local.py on this device, in float32 and bfloat16

Each part has processes and a time limit of its own; what fails is printed and recorded, and the
others go on. Times are of the wall clock between synchronisations of the device, variants in turns
step by step in the same processes: medians with 95 % intervals. "backward, host" is until backward
returns, with nothing queued before; with a small batch that is the host's own time. Waits of the
host, copies to it and kernels of a step are counted by torch.profiler. The share of the peak is the
products' operations, as `allstep.train.flops` counts them, over the rate of products of 8,192 x
8,192 matrices in the same dtype. GB/s of optimizers are those of the least traffic: 7 times the
parameters' bytes for Adam and 5 for momentum.

Keys, by model: `attach_vs_bare_...`, `ddp_vs_bare_...`, `attach_vs_ddp_...`, `share_of_peak_...`;
`lamb_vs_fused_adamw`, `lars_vs_fused_sgd`, `exact_price_...`, `batch_norm_vs_sync`. On a CPU models
are tiny, only to try the benchmark.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import print_headline, write_results
from gpu_worker import ROWS
from network import run_on_one_host
from rich.console import Console
from rich.table import Table

Rows = dict[str, dict[str, Any]]

FOLDER = Path(__file__).parent
RANKS = {"step": 1, "shared": 2, "optim": 1, "exact": 1, "formats": 1, "batch_norm": 2}
PARTS = (*RANKS, "local")
LEAST_S = 10.0  # without which nothing is started
HANG_SHARE = 0.8  # of the time left, after which a row hangs and those after it have their turn
LOCAL_DTYPES = ("float32", "bfloat16")
COUNTS = {  # heads of columns
    "kernels": "kernels",
    "waits": "waits",
    "copies_to_host": "to host",
    "copies_from_pageable": "unpinned",
}


def run_part(part: str, arguments: argparse.Namespace) -> Rows:
    """A part's rows by name; one that failed is an "error"."""
    if part == "local":
        return {dtype: run_local(dtype, arguments) for dtype in LOCAL_DTYPES}
    rows: Rows = {}
    deadline_s = time.monotonic() + arguments.limit_s
    while left := [name for name in ROWS[part] if name not in rows]:
        rest_s = deadline_s - time.monotonic()
        if rest_s < LEAST_S:
            return rows | {name: {"error": "there was no time left for it"} for name in left}
        limit_s = rest_s if len(left) == 1 else HANG_SHARE * rest_s
        rows |= run_rows(part, left, arguments, limit_s)
    return rows


def run_rows(
    part: str, names: Sequence[str], arguments: argparse.Namespace, limit_s: float
) -> Rows:
    """Rows of a part up to the first that fails; at least one."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        size = "tiny" if arguments.device == "cpu" else "whole"
        command = [sys.executable, FOLDER / "gpu_worker.py", file, part]
        command += [arguments.device, arguments.repeats, size, *names]
        said = "its process ended without a word"
        try:
            run_on_one_host(RANKS[part], command, timeout_s=limit_s, variables=_variables())
        except RuntimeError as error:
            said = str(error)
        rows: Rows = json.loads(file.read_text()) if file.exists() else {}
    left = [name for name in names if name not in rows]
    if left and not any("error" in row for row in rows.values()):
        rows[left[0]] = {"error": said}
    return rows


def _variables() -> dict[str, object]:
    """Of the ranks, which are to find allstep where this file is, installed or not."""
    path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}


def run_local(dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The headline of bench_local.py."""
    command = [sys.executable, str(FOLDER / "bench_local.py"), "--dtype", dtype]
    command += ["--device", arguments.device, *(["--quick"] if arguments.quick else [])]
    environment = os.environ | {name: str(value) for name, value in _variables().items()}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=arguments.limit_s, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"bench_local.py took longer than {arguments.limit_s:g} s"}
    if done.returncode:
        return {"error": done.stderr[-4000:]}
    print(done.stdout)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- tables ----------------------------------------------------------------------------------------


def show(part: str, rows: Rows) -> None:
    """Prints a part's table, and what failed."""
    good = {name: row for name, row in rows.items() if "error" not in row}
    if good and part in TABLES:
        Console(width=max(150, shutil.get_terminal_size().columns)).print(TABLES[part](good))
    for name, row in rows.items():
        if "error" in row:
            print(f"FAILED {part} {name}: {row['error']}", flush=True)


def step_table(rows: Rows) -> Table:
    columns = ("model", "variant", "step, ms", "over bare", "backward, host ms", "small batch, ms")
    workers = next(iter(rows.values()))["num_workers"]
    title = "One worker" if workers == 1 else f"{workers} workers on one GPU"
    table = Table(*columns, *_heads(), title=title)
    for name, row in rows.items():
        of_peak = row.get("share_of_peak")
        of_peak = "" if of_peak is None else f"{of_peak['median']:.0%} of the peak"
        for variant, step_ms in row["step_ms"].items():
            label = {
                "bare": name,
                "attach": f"batch {row['batch']}, {row['dtype']}",
                "ddp": of_peak,
            }
            table.add_row(
                label.get(variant, ""),
                variant,
                _cell(step_ms),
                _cell(row["vs_bare"].get(variant)),
                _cell(row["backward_host_ms"][variant]),
                _cell(row["small_backward_host_ms"][variant]),
                *_count_cells(row["counts"][variant]),
            )
    return table


def optimizer_table(rows: Rows) -> Table:
    columns = ("optimizer", "step, ms", "GB/s", "over", "ratio")
    table = Table(*columns, *_heads(), title="BERT-large's parameters, float32")
    for name, row in rows["bert_large"].items():
        table.add_row(
            name,
            _cell(row["step_ms"]),
            f"{row['gb_per_s']:.0f}",
            row["against"],
            _cell(row["ratio"]),
            *_count_cells(row["counts"]),
        )
    return table


def exact_table(rows: Rows) -> Table:
    table = Table("model", "sums", "step, ms", "exact over fp32", *_heads(), title="Exact sums")
    for name, row in rows.items():
        for compression, step_ms in row["step_ms"].items():
            price = row["price"] if compression == "exact" else None
            cells = _count_cells(row["counts"][compression])
            table.add_row(name, compression, _cell(step_ms), _cell(price), *cells)
    return table


def format_table(rows: Rows) -> Table:
    table = Table("format", "ms a bucket", "GB/s", *_heads(), title="Encode and decode, 25 MiB")
    for name, row in rows.items():
        speed = "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.0f}"
        table.add_row(name, _cell(row["sum_ms"]), speed, *_count_cells(row["counts"]))
    return table


def batch_norm_table(rows: Rows) -> Table:
    (row,) = rows.values()
    table = Table("batch norm", "ms", *_heads(), title=f"Forward and backward, {row['shape']}")
    for name, step_ms in row["step_ms"].items():
        table.add_row(name, _cell(step_ms), *_count_cells(row["counts"][name]))
    return table


TABLES: dict[str, Callable[[Rows], Table]] = {
    "step": step_table,
    "shared": step_table,
    "optim": optimizer_table,
    "exact": exact_table,
    "formats": format_table,
    "batch_norm": batch_norm_table,
}


def _heads() -> list[str]:
    return list(COUNTS.values())


def _count_cells(counts: dict[str, Any]) -> list[str]:
    return [str(counts[name]) for name in COUNTS]


def _cell(value: dict[str, float] | None) -> str:
    return "" if value is None else "{median:.4g} [{low:.4g}, {high:.4g}]".format(**value)


# -- the headline ----------------------------------------------------------------------------------


def headline(found: dict[str, Rows]) -> dict[str, float]:
    """What was measured of the keys."""
    return dict(_keys(found))


def _keys(found: dict[str, Rows]) -> Iterator[tuple[str, float]]:
    for name, row in _good(found, "step"):
        for variant in ("attach", "ddp"):
            yield f"{variant}_vs_bare_{name}", row["vs_bare"][variant]["median"]
        yield f"attach_vs_ddp_{name}", row["attach_vs_ddp"]["median"]
        if "share_of_peak" in row:
            yield f"share_of_peak_{name}", row["share_of_peak"]["median"]
    for _, row in _good(found, "optim"):
        yield "lamb_vs_fused_adamw", row["LAMB"]["ratio"]["median"]
        yield "lars_vs_fused_sgd", row["LARS"]["ratio"]["median"]
    for name, row in _good(found, "exact"):
        yield f"exact_price_{name}", row["price"]["median"]
    for _, row in _good(found, "batch_norm"):
        if "ours_vs_sync" in row:
            yield "batch_norm_vs_sync", row["ours_vs_sync"]["median"]


def _good(found: dict[str, Rows], part: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, row) for name, row in found.get(part, {}).items() if "error" not in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repeats; two minutes on an H100")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, help="default: 15, quick 5")
    parser.add_argument("--limit-s", type=float, help="of each part; default: 900, quick 150")
    arguments = parser.parse_args()
    arguments.device = "cuda" if arguments.device == "gpu" else "cpu"
    arguments.repeats = arguments.repeats or (5 if arguments.quick else 15)
    arguments.limit_s = arguments.limit_s or (150 if arguments.quick else 900)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; try the benchmark with --device cpu --quick")

    found: dict[str, Rows] = {}
    seconds: dict[str, float] = {}
    name = f"bench_gpu_{arguments.device}" + ("_quick" if arguments.quick else "")
    for part in arguments.parts:
        start_s = time.perf_counter()
        try:
            found[part] = run_part(part, arguments)
        except KeyboardInterrupt:
            print(f"FAILED {part}: interrupted", flush=True)
            break
        seconds[part] = time.perf_counter() - start_s
        show(part, found[part])
        print(f"{part}: {seconds[part]:.0f} s", flush=True)
        keys = headline(found)
        options = {"device": arguments.device, "repeats": arguments.repeats}
        write_results(name, {**options, "headline": keys, "part_s": seconds, "parts": found})
    failed = [f"{p} {n}" for p, rows in found.items() for n, row in rows.items() if "error" in row]
    print(f"written to {name}.json" + (f"; failed: {', '.join(failed)}" if failed else ""))
    print_headline(**headline(found))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
