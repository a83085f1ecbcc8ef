"""Predicted steps of a transformer on a mesh of two workers against measured ones.

    python benchmarks/bench_predict_mesh.py [--quick]

The transformer of the recipe `text` (four blocks, 64 tokens a sequence), two micro-batches of 16
sequences a copy and AdamW, on 2 x 1 (data parallel) and on 1 x 2 (tensor parallel), on two workers
of this host and on two hosts with a link of 1 Gbit/s (network.py: needs root and iproute2; left out
without them). What the machines take, and the parts of a micro-batch, is measured first, with both
workers busy. How long a step of a whole model on each worker takes, without any exchange, is
measured in turns with both meshes, step by step. Nothing is fitted to the steps that are predicted.
`naive_error_pct` is that of a prediction of 1 x 2 as if its workers were data parallel and shared
out one copy's batch.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import estimate, print_headline, write_results
from mesh_worker import MICRO_BATCH, TOKENS
from network import ShapedHosts, UnavailableError, run_on_one_host
from predict_mesh_worker import NUM_MICRO_BATCHES
from rich.console import Console
from rich.table import Table

from allstep.doctor import measurements_of
from allstep.files import from_plain
from allstep.plan import MeshSpec, PolicySpec, TrainingSpec, TransformerSpec, Workload, predict_mesh

LINKS = {"one host": None, "1 Gbit/s": 1e9}
WIDTHS = (128, 256)


def measure(rate_bps: float | None, widths: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """What rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        worker = Path(__file__).with_name("predict_mesh_worker.py")
        command = [sys.executable, worker, file, repeats, *widths]
        if rate_bps is None:
            run_on_one_host(2, command, timeout_s=1800)
        else:
            with ShapedHosts(2, rate_bps) as hosts:
                hosts.run(command, timeout_s=1800)
        return json.loads(file.read_text())


def compare(link: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each width and mesh."""
    cluster = measurements_of(found["measurements"]).cluster
    policy = PolicySpec(name="allstep", algorithm=found["algorithm"], bucket_bytes=None)
    rows = []
    for width, measured in found["widths"].items():
        workload = from_plain(Workload, measured["workload"])
        seconds = {name: [*zip(*pairs, strict=True)] for name, pairs in measured["steps"].items()}
        blocks = TransformerSpec(
            depth=4,
            width=int(width),
            heads=4,
            sequence_length=TOKENS,
            measured_share=measured["divided_share"],
            measured_logits_share=measured["logits_share"],
        )
        for mesh in (MeshSpec(data=2), MeshSpec(tensor=2)):
            batch = MICRO_BATCH * NUM_MICRO_BATCHES * mesh.data
            by_clock = []
            for whole_s, own_s in zip(seconds["whole"], seconds[str_of(mesh)], strict=True):
                job = TrainingSpec(micro=as_long(workload, whole_s), global_batch=batch)
                p = predict_mesh(job, blocks, cluster, policy, mesh)
                naive = predict_mesh(job, blocks, cluster, policy, MeshSpec(data=2))
                by_clock.append((p, naive, estimate(own_s)))
            named = {"link": link, "width": int(width), "mesh": str(mesh)}
            rows.append({**named, "divided_share": blocks.divided_share, **row_of(*by_clock)})
    return rows


def str_of(mesh: MeshSpec) -> str:
    return f"{mesh.data}x{mesh.tensor}"


def row_of(wall: tuple[Any, ...], cpu: tuple[Any, ...]) -> dict[str, Any]:
    """What (prediction, naive prediction, measured) say by either clock."""
    p, naive, measured = wall
    busy, _, on_core = cpu
    compute_s = busy.report.compute_s - busy.copy.activations_s
    return {
        "predicted_s": p.report.step_s,
        "waiting_share": p.waiting_share,
        "measured_s": measured.median,
        "interval_s": [measured.low, measured.high],
        "error_pct": 100 * (p.report.step_s / measured.median - 1),
        "naive_error_pct": 100 * (naive.report.step_s / measured.median - 1),
        "predicted_cpu_s": compute_s,
        "cpu_s": on_core.median,
        "cpu_error_pct": 100 * (compute_s / on_core.median - 1),
    }


def as_long(micro: Workload, whole_s: Sequence[float]) -> Workload:
    """The micro-batch with which a step takes what it took in turns with others."""
    alone = TrainingSpec(micro=micro, global_batch=MICRO_BATCH * NUM_MICRO_BATCHES).workload(1)
    times = estimate(whole_s).median / alone.compute_s
    names = ("forward_s", "backward_s", "optimizer_s")
    return replace(micro, **{name: times * getattr(micro, name) for name in names})


def show(rows: list[dict[str, Any]]) -> None:
    columns = ("predicted, ms", "waits", "measured, ms", "error", "naive", "cpu, ms", "error")
    table = Table("link", "width", "mesh", *columns)
    for row in rows:
        low, high = (1e3 * seconds for seconds in row["interval_s"])
        table.add_row(
            row["link"],
            str(row["width"]),
            row["mesh"],
            f"{1e3 * row['predicted_s']:.0f}",
            f"{row['waiting_share']:.0%}",
            f"{1e3 * row['measured_s']:.0f} ({low:.0f} to {high:.0f})",
            f"{row['error_pct']:+.0f} %",
            f"{row['naive_error_pct']:+.0f} %",
            f"{1e3 * row['predicted_cpu_s']:.0f} for {1e3 * row['cpu_s']:.0f}",
            f"{row['cpu_error_pct']:+.0f} %",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one width, few steps")
    known = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    widths, repeats = (WIDTHS[:1], 10) if known.quick else (WIDTHS, 16)
    rows: list[dict[str, Any]] = []
    for link, rate_bps in LINKS.items():
        try:
            rows += compare(link, measure(rate_bps, widths, repeats))
        except UnavailableError as reason:
            print(f"{link} is left out: {reason}")
    show(rows)
    worst = {
        f"worst_{name}_error_pct": max(abs(r["error_pct"]) for r in rows if r["mesh"] == str(mesh))
        for name, mesh in (("data", MeshSpec(data=2)), ("tensor", MeshSpec(tensor=2)))
    }
    write_results(f"bench_predict_mesh{'_quick' if known.quick else ''}", {"rows": rows, **worst})
    print_headline(**worst)


if __name__ == "__main__":
    main()
