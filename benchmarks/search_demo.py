"""Finds the settings of the large-batch panel of `allstep demo`, on training digits held out.

    python benchmarks/search_demo.py [--quick] [--jobs N]

Every line that has something to tune gets four trials of two seeds. The trial with the least mean
loss on 288 held-out training digits is taken; the test digits take no part. Results are written
to benchmarks/results/search_demo.json (with `--quick`, one seed: ..._quick.json); the settings in
allstep/cli/demo/large_batch.py are changed by hand.
"""

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from common import print_headline, write_results

from allstep.cli.demo.large_batch import (
    FACTOR,
    LINES,
    SMALL_BATCH,
    Line,
    train,
)
from allstep.cli.demo.processes import Processes
from allstep.env import num_cores
from allstep.optim import linear_scaling

SEEDS = (100, 101)


def candidates(line: Line) -> list[dict[str, Any]]:
    """All settings of a line that are tried."""
    grid = itertools.product(*line.trials.values())
    return [{**line.fields, **dict(zip(line.trials, values, strict=True))} for values in grid]


def search(
    processes: Processes,
    line: Line,
    trials: list[dict[str, Any]],
    seeds: Sequence[int],
    jobs_at_once: int,
) -> dict[str, Any]:
    """The mean loss and accuracy of each trial, and the best of them."""
    jobs = [(number, seed) for number in range(len(trials)) for seed in seeds]
    calls = [
        (train, {"fields": trials[number], "seed": seed, "is_trial": True}) for number, seed in jobs
    ]
    found: list[list[dict[str, float]]] = [[] for _ in trials]
    for job, metrics in processes.each(calls, jobs_at_once):
        found[jobs[job][0]].append(metrics)
    table = [
        {
            **{name: trial[name] for name in line.trials},
            "loss": mean(m["loss"] for m in metrics),
            "accuracy": mean(m["accuracy"] for m in metrics),
        }
        for trial, metrics in zip(trials, found, strict=True)
    ]
    best = min(table, key=lambda row: row["loss"])
    for row in table:
        mark = "*" if row is best else " "
        print(mark, line.name, *(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return {"trials": table, "best": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=num_cores(), help="trainings at a time")
    parser.add_argument("--quick", action="store_true", help="one seed instead of two")
    arguments = parser.parse_args()
    seeds = SEEDS[:1] if arguments.quick else SEEDS
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        for line in LINES:
            if not line.trials:
                continue
            trials = candidates(line)
            if line.name == "with warm-up":  # its rate follows from what was just found
                small_lr = results["small batch"]["best"]["lr"]
                rate = linear_scaling(small_lr, SMALL_BATCH, FACTOR * SMALL_BATCH)
                trials = [{**trial, "lr": rate} for trial in trials]
            results[line.name] = search(processes, line, trials, seeds, arguments.jobs)
    write_results(f"search_demo{'_quick' if arguments.quick else ''}", {"lines": results})
    print_headline(**{name: found["best"]["accuracy"] for name, found in results.items()})


if __name__ == "__main__":
    main()
