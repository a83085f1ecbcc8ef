"""Held-out loss of `text` with experts beside a single feed-forward network a block.

    python benchmarks/bench_experts.py [--folder TEXTS] [--seeds 3] [--epochs 5] [--quick]

A token takes as many operations in each: `top_k` experts have as many hidden features together as
the single network. Runs of a seed have the same tokens in the same order, on one worker of one
thread. Without a folder the texts are the topics of Python's own help. Prints a table, writes
benchmarks/results/bench_experts.json, ends with one line of JSON: `gain_<variant>`, the mean loss
of the single network less that of the variant, nats a token, and `cpu_ratio_<variant>`.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from common import print_headline, write_results
from rich.console import Console
from rich.table import Table

from allstep import Communicator, fit
from allstep.recipes import REGISTRY, Recipe

SIZE = {"width": 64, "depth": 2, "vocab_size": 512, "global_batch": 32, "micro_batch": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "single": {},
    "single_longer": {"epochs": 8},  # about the CPU seconds of two experts of eight in five
    "1_of_8": {"experts": 8, "top_k": 1},
    "2_of_8": {"experts": 8},
    "2_of_8_limited": {"experts": 8, "capacity_factor": 1.25},
}


def train(recipe: Recipe) -> dict[str, Any]:
    """One run: its metrics, parameters and seconds of a CPU."""
    comm = Communicator.single_process()
    begin_s = time.process_time()
    with tempfile.TemporaryDirectory() as run_dir:
        task = recipe.task(comm)
        report = fit(task, recipe, comm, run_dir)
    return {
        "metrics": dict(report.metrics),
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "steps": report.num_steps,
        "cpu_s": time.process_time() - begin_s,
    }


def write_topics(folder: Path) -> None:
    """The texts of `help()`, a file each."""
    for name, text in topics.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="of .txt files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch")
    known = parser.parse_args()
    if known.quick:
        known.seeds, known.epochs = 1, 1
        VARIANTS["single_longer"]["epochs"] = 2
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as texts:
        if known.folder is None:
            write_topics(Path(texts))
        usual = REGISTRY["text"](folder=known.folder or Path(texts), epochs=known.epochs, **SIZE)
        for seed in range(known.seeds):
            for name, fields in VARIANTS.items():
                recipe: Any = replace(usual, seed=seed, **fields)
                runs.append({"variant": name, "seed": seed, **train(recipe)})
                print(runs[-1], flush=True)
    keys = show(runs)
    write_results("bench_experts_quick" if known.quick else "bench_experts", {"runs": runs, **keys})
    print_headline(**keys)


def show(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Prints the table; returns what each variant gains over the single network, and its cost."""
    table = Table("", "parameters", "loss, by seed", "mean", "dropped", "CPU seconds")
    keys: dict[str, float] = {}
    means: dict[str, tuple[float, float]] = {}
    for name in VARIANTS:
        mine = [run for run in runs if run["variant"] == name]
        losses = [run["metrics"]["loss"] for run in mine]
        cpu_s = statistics.mean(run["cpu_s"] for run in mine)
        means[name] = statistics.mean(losses), cpu_s
        dropped = statistics.mean(run["metrics"].get("dropped", 0.0) for run in mine)
        table.add_row(
            name,
            f"{mine[0]['parameters']:,}",
            " ".join(f"{loss:.4f}" for loss in losses),
            f"{means[name][0]:.4f}",
            f"{100 * dropped:.1f} %",
            f"{cpu_s:.0f}",
        )
        if name != "single":
            keys[f"gain_{name}"] = means["single"][0] - means[name][0]
            keys[f"cpu_ratio_{name}"] = cpu_s / means["single"][1]
    Console(width=120).print(table)
    return keys


if __name__ == "__main__":
    main()
