"""A training step with 100 MB of gradients on one host: allstep against DDP on Gloo.

    python benchmarks/bench_exchange.py [--quick] [--ranks 2]

Processes of one thread each. The net computes little and the optimizer's update is left out, so
that the exchange is what is measured;
"alone" is the same step without any. DDP is measured with and without `gradient_as_bucket_view`,
and the claims are against the faster. Keys: `speedup_vs_ddp` (default policy), `native_vs_ddp`
(our time over DDP's with the same all-reduce), `agreement_pct` (what comparing the workers takes of
a step of the recipe `fashion`; it sends no message of its own), `hook_us` and `hook_vs_ddp` (what
a small parameter adds to the backward pass, and over what it adds with DDP).
"""

import argparse
import json
import sys
import tempfile
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from bench_overhead import GLOBAL_BATCH, fashion_task
from common import estimate, print_headline, ratio, write_results
from exchange_worker import Point, run_point
from network import run_on_one_host
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

import allstep
from allstep.comm.agreement import digest
from allstep.exchange.buckets import BucketPlan, BucketSet
from allstep.exchange.parameters import signature
from allstep.exchange.state_sweep import StateSweep

VARIANTS = ("alone", "ddp", "ddp view", "fp32", "native")
SHOWN = {"ddp": "DDP", "ddp view": "DDP, views", "fp32": "allstep", "native": "allstep, native"}
TARGETS = {"speedup_vs_ddp": 2.0, "native_vs_ddp": 1.0, "agreement_pct": 0.5, "hook_us": 6.0}
GRADIENT_BYTES = 24 * 1024 * 1024 * 4  # 24 square layers


def measure(num_ranks: int, repeats: int, steps: int) -> dict[str, list[float]]:
    """Variant -> seconds of a step, of the slowest rank, in each repeat."""
    point = Point(
        variants=VARIANTS,
        gradient_bytes=GRADIENT_BYTES,
        num_layers=24,
        updates=False,
        repeats=repeats,
        steps=steps,
    )

    def run(command: list[object], *, timeout_s: float) -> None:
        run_on_one_host(num_ranks, command, timeout_s=timeout_s)

    with tempfile.TemporaryDirectory() as folder:
        measured = run_point(point, run, Path(folder))
    return {name: row["seconds"] for name, row in measured.items()}


def agreement_pct(repeats: int) -> list[float]:
    """Per cent of a step of `fashion` that a worker spends on the comparison of the workers."""
    task = fashion_task(GLOBAL_BATCH)
    model, batch = task.model, next(iter(DataLoader(task.train_set, GLOBAL_BATCH)))
    parameters = dict(model.named_parameters())
    buckets = BucketSet.new(BucketPlan.of([list(parameters)], parameters, 2))
    described, optimizer = signature(parameters), torch.optim.AdamW(parameters.values())
    described_digest = digest(described)
    sweep, counter = StateSweep(), count()
    sweep.set_tensors(parameters)
    comm = allstep.Communicator.single_process()

    def compare() -> None:
        number = next(counter)
        sweep.note_update(optimizer, number)
        state = sweep.next_part(number, torch.device("cpu"))
        action = f"exchange gradients {number}"
        buckets.tail.write_check(0, action, described, described_digest, state)
        buckets.tail.check.zero_()  # what the sum over workers that agree is
        buckets.tail.read().raise_if_bad(comm)

    found = []
    for repeat in range(-3, repeats):
        start_s = perf_counter()
        task.loss(model, batch).backward()
        middle_s = perf_counter()
        compare()  # what the backward pass has left of the caches is what it finds in training
        if repeat >= 0:
            found.append(100 * (perf_counter() - middle_s) / (middle_s - start_s))
    return found


def hook_us(num_ranks: int, repeats: int) -> dict[str, list[float]]:
    """Variant -> microseconds that a small parameter adds to a backward pass."""
    with tempfile.TemporaryDirectory() as folder:
        file, worker = Path(folder) / "hooks.measured", Path(__file__).with_name("hook_worker.py")
        run_on_one_host(num_ranks, [sys.executable, worker, file, repeats], timeout_s=600)
        measured: dict[str, list[float]] = json.loads(file.read_text())
    return measured


def row_of(seconds: list[float], peer: list[float]) -> dict[str, Any]:
    """What is written about a variant."""
    step, faster = estimate(seconds), ratio(peer, seconds)
    return {
        "step_s": step.median,
        "interval_s": [step.low, step.high],
        "speedup_vs_ddp": faster.median,
        "speedup_interval": [faster.low, faster.high],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about a minute on two cores")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, help="default: 25, quick 7")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repeats = arguments.repeats or (7 if arguments.quick else 25)
    seconds = measure(arguments.ranks, repeats, steps=2 if arguments.quick else 4)

    peer = min(("ddp", "ddp view"), key=lambda name: estimate(seconds[name]).median)
    title = f"{arguments.ranks} ranks, {GRADIENT_BYTES / 1e6:.0f} MB of gradients"
    table = Table("", "step, ms", f"times as fast as {SHOWN[peer]}", title=title)
    for name in VARIANTS:
        step_ms = estimate([1e3 * s for s in seconds[name]])
        table.add_row(SHOWN.get(name, name), str(step_ms), f"{ratio(seconds[peer], seconds[name])}")
    Console().print(table)
    agreement = estimate(agreement_pct(repeats))
    print(f"comparing the workers takes {agreement} % of a step of `fashion`")
    hooks = hook_us(arguments.ranks, repeats)
    hook_peer = min(("ddp", "ddp view"), key=lambda name: estimate(hooks[name]).median)
    added = {name: str(estimate(values)) for name, values in hooks.items()}
    print(f"a small parameter adds, in us of a backward pass: {added}")
    keys = {
        "hook_us": estimate(hooks["allstep"]).median,
        "hook_vs_ddp": ratio(hooks["allstep"], hooks[hook_peer]).median,
        "agreement_pct": agreement.median,
        "speedup_vs_ddp": ratio(seconds[peer], seconds["fp32"]).median,
        "native_vs_ddp": ratio(seconds["native"], seconds[peer]).median,
    }
    rows = {name: row_of(seconds[name], seconds[peer]) for name in VARIANTS}
    results = {
        "num_ranks": arguments.ranks,
        "peer": peer,
        "repeats": repeats,
        "rows": rows,
        "hooks": hooks,
    }
    write_results("bench_exchange", {"targets": TARGETS, **keys, **results})
    print_headline(**keys)


if __name__ == "__main__":
    main()
