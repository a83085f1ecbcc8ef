"""Test accuracy with exact sums beside float32's, and how often gradients leave the grid.

    python benchmarks/bench_exact_accuracy.py [RECIPE:OPTIMIZER ...] [--seeds 3] [--epochs N]
        [--folder TEXTS] [--quick]

Each run is a whole training on one worker of one thread: with exact sums the same bits come out on
any number of them. Prints a table, writes benchmarks/results/bench_exact_accuracy.json, ends with
one line of JSON: `difference_<recipe>_<optimizer>`, the mean metric with exact sums less that with
float32's, and `completed_share`: of all exact runs' steps after the first ten
those in which a gradient did not fit, so that a second message was needed.
"""

import argparse
import statistics
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import print_headline, write_results
from rich.console import Console
from rich.table import Table

from allstep import Communicator
from allstep.recipes import REGISTRY, Recipe
from allstep.train.run import Run

FIRST_STEPS = 10
LR = {"lamb": 0.01, "adamw": 3e-3}  # sgd has the recipe's own
METRIC = {"text": "loss"}  # of the others the accuracy


def train(recipe: Recipe) -> dict[str, Any]:
    """One run: its metrics, and the steps whose sums took a second message."""
    comm = Communicator.single_process()
    completed: list[int] = []  # so far, after each step
    with closing(Run(recipe.task(comm), recipe, comm)) as run:
        while run.epoch < recipe.epochs:
            run.begin_epoch()
            for _ in run.updates():
                completed.append(run.exchange.stats().num_completed)
        metrics = run.evaluate()
    first = completed[min(FIRST_STEPS, len(completed)) - 1]
    return {
        "metrics": metrics,
        "steps": len(completed),
        "completed_first": first,
        "completed_later": completed[-1] - first,
    }


def make_recipe(
    name: str, optimizer: str, seed: int, compression: str, epochs: int | None, folder: Path | None
) -> Recipe:
    recipe: Recipe = REGISTRY[name](seed=seed, compression=compression, optimizer=optimizer)
    recipe = replace(recipe, lr=LR[optimizer]) if optimizer in LR else recipe
    recipe = recipe if epochs is None else replace(recipe, epochs=epochs)
    return recipe if folder is None or name != "text" else replace(recipe, folder=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="RECIPE:OPTIMIZER")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="by default the recipe's own")
    parser.add_argument("--folder", type=Path, help="of the recipe `text`")
    parser.add_argument("--quick", action="store_true", help="digits only, two epochs, two seeds")
    known = parser.parse_args()
    wanted = known.runs or ["digits:sgd", "digits:lamb", "digits:adamw", "fashion:sgd"]
    if known.quick:
        wanted, known.epochs, known.seeds = ["digits:sgd"], 2, 2
    torch.set_num_threads(1)

    table = Table(
        "", "exact, by seed", "fp32, by seed", "difference", "seeds differ by", "completed"
    )
    keys: dict[str, float] = {}
    runs: list[dict[str, Any]] = []
    for entry in wanted:
        name, optimizer = entry.split(":")
        metric = METRIC.get(name, "accuracy")
        found: dict[str, list[float]] = {"exact": [], "fp32": []}
        for seed in range(known.seeds):
            for compression in found:
                recipe = make_recipe(name, optimizer, seed, compression, known.epochs, known.folder)
                run = {"recipe": name, "optimizer": optimizer, "seed": seed, **train(recipe)}
                runs.append({**run, "compression": compression, "epochs": recipe.epochs})
                found[compression].append(run["metrics"][metric])
                print(runs[-1], flush=True)
        mine = [r for r in runs if (r["recipe"], r["optimizer"]) == (name, optimizer)]
        exact = [r for r in mine if r["compression"] == "exact"]
        difference = statistics.mean(found["exact"]) - statistics.mean(found["fp32"])
        keys[f"difference_{name}_{optimizer}"] = difference
        later = sum(r["completed_later"] for r in exact)
        num = sum(r["steps"] - FIRST_STEPS for r in exact)
        table.add_row(
            f"{name}, {optimizer}, {metric}",
            *(" ".join(f"{x:.4f}" for x in values) for values in found.values()),
            f"{difference:+.4f}",
            f"{statistics.stdev(found['fp32']):.4f}",
            f"{later} of {num} steps",
        )
    exact = [r for r in runs if r["compression"] == "exact"]
    num = sum(r["steps"] - FIRST_STEPS for r in exact)
    keys["completed_share"] = sum(r["completed_later"] for r in exact) / num
    Console(width=160).print(table)
    name = "bench_exact_accuracy_quick" if known.quick else "bench_exact_accuracy"
    write_results(name, {"runs": runs, **keys})
    print_headline(**keys)


if __name__ == "__main__":
    main()
