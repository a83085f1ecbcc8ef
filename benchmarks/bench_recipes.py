"""What recipes reach at their defaults, and in how many minutes: several seeds of `allstep train`.

    python benchmarks/bench_recipes.py digits fashion "gru --folder texts" "bert --folder texts"
    python benchmarks/bench_recipes.py "finetune --folder glosses --pretrained runs/bert-0"
    python benchmarks/bench_recipes.py --report        # of the runs that there are

Each word is a recipe with flags that it can't do without. Every run that ends is a line of
benchmarks/results/recipes.jsonl, and is not run again; its folder is `--runs`/<recipe>-<seed>.
Prints a table, writes benchmarks/results/bench_recipes.json, ends with one line of JSON:
`<metric>_<recipe>`, the mean over the seeds, and `train_s_<recipe>`, the longest run, start
included, each of a recipe's first command. `--quick`: one seed of `digits`, in recipes_quick.jsonl.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, print_headline, read_runs, write_results
from rich.console import Console
from rich.table import Table

METRICS = ("accuracy", "loss")


def train(command: str, num_workers: int, seed: int, run_dir: Path) -> dict[str, Any]:
    """One run: what it reached, and how long it and its processes took."""
    arguments = ["--workers", str(num_workers), "--seed", str(seed), "--run-dir", str(run_dir)]
    words = [sys.executable, "-m", "allstep", "train", *shlex.split(command), *arguments]
    start_s, before = time.perf_counter(), os.times()
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)} failed:\n{done.stderr[-2000:]}")
    seconds, after = time.perf_counter() - start_s, os.times()
    report = json.loads((run_dir / "report.json").read_text())
    return {
        "command": command,
        "workers": num_workers,
        "seed": seed,
        "seconds": seconds,
        "cpu_s": after.children_user
        + after.children_system
        - before.children_user
        - before.children_system,
        "load_average": os.getloadavg()[0],
        "num_steps": report["num_steps"],
        "metrics": report["metrics"],
    }


def run_all(commands: Sequence[str], path: Path, options: argparse.Namespace) -> None:
    """Trains what is not in the file, seed by seed, and adds it."""
    done = {(run["command"], run["seed"]) for run in read_runs(path)}
    for seed in range(1 if options.quick else options.seeds):
        for command in commands:
            if (command, seed) in done:
                continue
            run_dir = options.runs / f"{shlex.split(command)[0]}-{seed}"
            run = train(command, options.workers, seed, run_dir)
            print(f"{command}, seed {seed}: {run['metrics']}, {run['seconds']:.0f} s", flush=True)
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=["digits"], metavar="'RECIPE FLAGS'")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--quick", action="store_true", help="one seed of digits")
    options = parser.parse_args()
    path = RESULTS / ("recipes_quick.jsonl" if options.quick else "recipes.jsonl")
    if not options.report:
        run_all(["digits"] if options.quick else options.recipes, path, options)

    runs = read_runs(path)
    table = Table("recipe", "workers", "metric", "by seed", "mean", "seconds, longest", "of CPU")
    headline = {}
    for command in dict.fromkeys(run["command"] for run in runs):
        mine = [run for run in runs if run["command"] == command]
        recipe, metrics = shlex.split(command)[0], mine[0]["metrics"]
        longest_s = max(run["seconds"] for run in mine)
        for metric in (name for name in METRICS if name in metrics):
            values = [run["metrics"][metric] for run in sorted(mine, key=lambda run: run["seed"])]
            table.add_row(
                command,
                str(mine[0]["workers"]),
                metric,
                ", ".join(f"{value:.4f}" for value in values),
                f"{statistics.mean(values):.4f}",
                f"{longest_s:.0f}",
                f"{max(run['cpu_s'] for run in mine):.0f}",
            )
            # Of a recipe's first command.
            headline.setdefault(f"{metric}_{recipe}", statistics.mean(values))
        headline.setdefault(f"train_s_{recipe}", longest_s)
    Console().print(table)
    write_results("bench_recipes_quick" if options.quick else "bench_recipes", headline)
    print_headline(**headline)


if __name__ == "__main__":
    main()
