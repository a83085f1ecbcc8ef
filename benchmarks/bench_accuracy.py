"""Test accuracy of recipes, as the mean of several seeds, each trained by `allstep train`.

    python benchmarks/bench_accuracy.py digits:2 fashion:1 [--seeds 3] [--quick]

`digits:2` is the recipe `digits` on two workers. Prints a table, writes
benchmarks/results/bench_accuracy.json, ends with one line of JSON: `accuracy_<recipe>` and
`train_s_<recipe>`, the mean accuracy in per cent and the longest run in seconds, start included.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import print_headline, write_results
from rich.console import Console
from rich.table import Table


def train(recipe: str, num_workers: int, seed: int) -> dict[str, Any]:
    """One run; its report and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "allstep", "train", recipe]
        command += ["--workers", str(num_workers), "--seed", str(seed), "--run-dir", str(run_dir)]
        start_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - start_s
        report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    return {
        "recipe": recipe,
        "workers": num_workers,
        "seed": seed,
        "seconds": seconds,
        "accuracy": report["metrics"]["accuracy"],
        "samples_per_s": report["samples_per_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=["digits:2"], metavar="RECIPE[:WORKERS]")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="digits alone")
    arguments = parser.parse_args()
    runs = []
    for entry in ["digits:2"] if arguments.quick else arguments.recipes:
        recipe, _, num_workers = entry.partition(":")
        runs += [train(recipe, int(num_workers or 1), seed) for seed in range(arguments.seeds)]

    table = Table("recipe", "workers", "accuracy by seed, %", "mean, %", "seconds, longest")
    headline = {}
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        mine = [run for run in runs if run["recipe"] == recipe]
        accuracies = [100 * run["accuracy"] for run in mine]
        longest_s = max(run["seconds"] for run in mine)
        listed = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        mean = statistics.mean(accuracies)
        table.add_row(recipe, str(mine[0]["workers"]), listed, f"{mean:.2f}", f"{longest_s:.0f}")
        headline |= {f"accuracy_{recipe}": mean, f"train_s_{recipe}": longest_s}
    Console().print(table)
    write_results("bench_accuracy", {"runs": runs, **headline})
    print_headline(**headline)


if __name__ == "__main__":
    main()
