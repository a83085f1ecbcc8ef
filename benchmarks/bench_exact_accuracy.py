"""Test accuracy with exact sums beside float32's, and how often gradients leave the grid.

    python benchmarks/bench_exact_accuracy.py [RECIPE:OPTIMIZER[:SEEDS] ...] [--seeds 3]
        [--epochs N] [--folder TEXTS] [--nudged] [--quick]

Each run is a whole training on one worker of one thread: with exact sums the same bits come out on
any number of them. A run that benchmarks/results/bench_exact_accuracy.jsonl has is not trained
again. Prints a table, writes benchmarks/results/bench_exact_accuracy.json, ends with one line of
JSON: `difference_<recipe>_<optimizer>`, the mean metric with exact sums less that with float32's,
and `completed_share`: of all exact runs' steps after the first ten those in which a gradient did
not fit, so that a second message was needed.

Trainings amplify rounding, so that one of other last bits is another draw. `--nudged` says how far
such draws are apart: float32's runs again, whose first parameters are larger or smaller by 1e-7;
`nudged_<recipe>_<optimizer>` is their mean metric less that of the others.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, circumstances, print_headline, read_runs, write_results
from rich.console import Console
from rich.table import Table
from torch import nn

from allstep import Communicator
from allstep.recipes import REGISTRY, Recipe
from allstep.train.run import Run

FIRST_STEPS = 10
LR = {"lamb": 0.01, "adamw": 3e-3}  # sgd has the recipe's own
COMPRESSIONS = ("exact", "fp32")
NUDGED, NUDGE = "fp32, nudged", 1e-7
METRIC = {"text": "loss"}  # of the others the accuracy


def train(recipe: Recipe, *, is_nudged: bool = False) -> dict[str, Any]:
    """One run: its metrics, and the steps whose sums took a second message."""
    comm = Communicator.single_process()
    completed: list[int] = []  # so far, after each step
    task = recipe.task(comm)
    if is_nudged:
        nudge(task.model, recipe.seed)
    with closing(Run(task, recipe, comm)) as run:
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


@torch.no_grad()
def nudge(model: nn.Module, seed: int) -> None:
    """Other last bits."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p *= 1 + NUDGE * torch.randn(p.shape, generator=generator)


def make_recipe(
    name: str, optimizer: str, seed: int, compression: str, epochs: int | None, folder: Path | None
) -> Recipe:
    recipe: Recipe = REGISTRY[name](seed=seed, compression=compression, optimizer=optimizer)
    recipe = replace(recipe, lr=LR[optimizer]) if optimizer in LR else recipe
    recipe = recipe if epochs is None else replace(recipe, epochs=epochs)
    return recipe if folder is None or name != "text" else replace(recipe, folder=folder)


def runs_of(wanted: Sequence[str], num_seeds: int) -> Iterator[tuple[str, str, int]]:
    """Recipe, optimizer, seed."""
    for entry in wanted:
        name, optimizer, *num = entry.split(":")
        for seed in range(int(num[0]) if num else num_seeds):
            yield name, optimizer, seed


def run_all(flags: argparse.Namespace, wanted: Sequence[str], path: Path) -> list[dict[str, Any]]:
    """The runs of `wanted`; those that are not in the file are trained and added to it."""
    old = read_runs(path)
    found: list[dict[str, Any]] = []
    planned = list(runs_of(wanted, flags.seeds))
    for (name, optimizer, seed), kind in product(planned, (*COMPRESSIONS, NUDGED)):
        compression = kind.split(",")[0]
        recipe = make_recipe(name, optimizer, seed, compression, flags.epochs, flags.folder)
        what = {
            "recipe": name,
            "optimizer": optimizer,
            "seed": seed,
            "compression": kind,
            "epochs": recipe.epochs,
        }
        run = next((run for run in old if what.items() <= run.items()), None)
        if run is None and kind == NUDGED and not flags.nudged:
            continue
        if run is None:
            measured = train(recipe, is_nudged=kind == NUDGED)
            run = {**what, **measured, "date": circumstances()["date"]}
            print(run, flush=True)
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
        found.append(run)
    return found


def completed_share(runs: Sequence[dict[str, Any]]) -> float:
    """Of the exact runs' steps after the first ones, those with a second message."""
    exact = [run for run in runs if run["compression"] == "exact"]
    num = sum(run["steps"] - FIRST_STEPS for run in exact)
    return sum(run["completed_later"] for run in exact) / num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="RECIPE:OPTIMIZER[:SEEDS]")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="by default the recipe's own")
    parser.add_argument("--folder", type=Path, help="of the recipe `text`")
    parser.add_argument("--nudged", action="store_true", help="float32 with other last bits, too")
    parser.add_argument("--quick", action="store_true", help="digits only, two epochs, two seeds")
    flags = parser.parse_args()
    wanted = flags.runs or ["digits:sgd", "digits:lamb", "digits:adamw", "fashion:sgd"]
    if flags.quick:
        wanted, flags.epochs, flags.seeds = ["digits:sgd"], 2, 2
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    name = "bench_exact_accuracy_quick" if flags.quick else "bench_exact_accuracy"
    runs = run_all(flags, wanted, RESULTS / f"{name}.jsonl")

    table = Table(
        *("", "exact, by seed", "fp32, by seed", "difference", "seeds differ by"),
        *("fp32, nudged", "difference", "completed"),
    )
    keys: dict[str, float] = {}
    for entry in wanted:
        recipe, optimizer, *_ = entry.split(":")
        mine = [run for run in runs if (run["recipe"], run["optimizer"]) == (recipe, optimizer)]
        metric = METRIC.get(recipe, "accuracy")
        exact, fp32, nudged = (
            [run["metrics"][metric] for run in mine if run["compression"] == kind]
            for kind in (*COMPRESSIONS, NUDGED)
        )
        difference = statistics.mean(exact) - statistics.mean(fp32)
        keys[f"difference_{recipe}_{optimizer}"] = difference
        moved = "-"
        if nudged:
            keys[f"nudged_{recipe}_{optimizer}"] = statistics.mean(nudged) - statistics.mean(fp32)
            moved = f"{keys[f'nudged_{recipe}_{optimizer}']:+.4f}"
        table.add_row(
            f"{recipe}, {optimizer}, {metric}",
            *(" ".join(f"{value:.4f}" for value in values) for values in (exact, fp32)),
            f"{difference:+.4f}",
            f"{statistics.stdev(fp32):.4f}",
            " ".join(f"{value:.4f}" for value in nudged) or "-",
            moved,
            f"{completed_share(mine):.3%} of steps",
        )
    keys["completed_share"] = completed_share(runs)
    Console(width=160).print(table)
    write_results(name, {"runs": runs, **keys})
    print_headline(**keys)


if __name__ == "__main__":
    main()
