"""What each way to exchange costs in accuracy: the recipe `fashion` at equal epochs.

    python benchmarks/bench_policy_accuracy.py [--quick] [--seeds 3] [--policies fp32 int8 ...]
    python benchmarks/bench_policy_accuracy.py --report       # of the runs that there are

Two worker processes of one thread train each policy with each seed, and nothing else differs:
not the learning rate, nor the batch of 128. Every run that ends is a line of
benchmarks/results/policy_accuracy.jsonl, and is not run again. Writes policy_accuracy.json there
and docs/tables/policy_accuracy.md. "Lost" is the mean over the seeds of the difference to fp32's
run with the same seed, in points. `--quick`: one seed, one epoch, two policies, in
policy_accuracy_quick.*, no docs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import RESULTS, circumstances, print_headline, read_runs, write_results
from network import run_on_one_host
from rich.console import Console
from rich.table import Table

import allstep
from allstep import ExchangePolicy, LocalSGD, Nesterov, Stale, Synchronous
from allstep.plan import POLICIES
from allstep.recipes.fashion import Fashion

NUM_WORKERS, EPOCHS = 2, 5
BASE = "fp32"
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "tables" / "policy_accuracy.md"
PLANNER = ROOT / "allstep" / "plan" / "accuracy_cost.json"
# Points that may be lost.
ALLOWED = {"fp16": 0.3, "bf16": 0.3, "int8": 0.3, "staleness 1": 0.5}


def policies() -> dict[str, ExchangePolicy]:
    """Every policy of the study; local SGD's moments become their mean, too."""
    found = {
        BASE: Synchronous(),
        "fp16": Synchronous(compression="fp16"),
        "bf16": Synchronous(compression="bf16"),
        "int8": Synchronous(compression="int8"),
        "powersgd, rank 4": Synchronous(compression="powersgd"),
        "topk, 1 %": Synchronous(compression="topk"),
    }
    for staleness in (1, 2, 4, 8):
        found[f"staleness {staleness}"] = Stale(steps=staleness)
    found["fp16 + staleness 1"] = Stale(compression="fp16", steps=1)
    for every in (4, 16):
        found[f"local SGD, H = {every}"] = LocalSGD(sync_every=every, average_optimizer_state=True)
    found["DiLoCo, H = 16"] = LocalSGD(sync_every=16, outer_optimizer=Nesterov())
    return found


@dataclass(frozen=True, kw_only=True)
class Studied(Fashion):
    """The recipe under a policy of the study."""

    policy: ExchangePolicy = field(default_factory=Synchronous)
    channels_last: bool = True  # 1.6 times as fast

    @property
    def exchange_policy(self) -> ExchangePolicy:
        return self.policy


def train(name: str, seed: int, epochs: int) -> dict[str, Any]:
    """One run; what is kept of it."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, __file__, "--worker", name, str(seed), str(epochs), str(run_dir)]
        start_s = time.perf_counter()
        run_on_one_host(NUM_WORKERS, command, timeout_s=4 * 3600)
        seconds = time.perf_counter() - start_s
        accuracy = json.loads((run_dir / "accuracy.json").read_text())
    run = {"policy": name, "seed": seed, "epochs": epochs, "workers": NUM_WORKERS}
    return run | {"accuracy": accuracy, "seconds": seconds, "date": circumstances()["date"]}


def work(name: str, seed: int, epochs: int, run_dir: Path) -> None:
    """A worker's life."""
    with allstep.init(device="cpu") as comm:
        recipe = Studied(seed=seed, epochs=epochs, policy=policies()[name])
        report = allstep.fit(recipe.task(comm), recipe, comm, run_dir)
        if comm.rank == 0:
            (run_dir / "accuracy.json").write_text(json.dumps(report.metrics["accuracy"]))


def run_all(names: Sequence[str], num_seeds: int, epochs: int, path: Path) -> list[dict[str, Any]]:
    """All runs; those that are not in the file are trained, seed by seed, and added to it."""
    RESULTS.mkdir(exist_ok=True)
    runs = read_runs(path)
    done = {(run["policy"], run["seed"], run["epochs"]) for run in runs}
    for seed in range(num_seeds):
        for name in names:
            if (name, seed, epochs) in done:
                continue
            run = train(name, seed, epochs)
            print(f"{name}, seed {seed}: {run['accuracy']:.2%}, {run['seconds']:.0f} s", flush=True)
            runs.append(run)
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
    return [run for run in runs if run["epochs"] == epochs]


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Policy -> accuracy and points lost against fp32, mean and standard deviation over seeds."""
    of_base = {run["seed"]: 100 * run["accuracy"] for run in runs if run["policy"] == BASE}
    rows = {}
    for name in policies():
        own = {run["seed"]: 100 * run["accuracy"] for run in runs if run["policy"] == name}
        lost = [of_base[seed] - own[seed] for seed in own if seed in of_base]
        if own:
            rows[name] = {
                "accuracy": mean_and_std(list(own.values())),
                "lost": mean_and_std(lost) if lost else None,
                "num_seeds": len(own),
                "allowed": ALLOWED.get(name),
            }
    return rows


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def table_rows(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """policy, seeds, accuracy, lost, allowed; in words."""
    found = []
    for name, row in rows.items():
        spread = row["num_seeds"] > 1
        cells = [name, str(row["num_seeds"])]
        for key in ("accuracy", "lost"):
            mean, std = row[key] or (float("nan"), 0.0)
            cells.append(f"{mean:.2f} ± {std:.2f}" if spread else f"{mean:.2f}")
        allowed = row["allowed"]
        found.append([*cells, "" if allowed is None else f"{allowed:g}"])
    return found


def write_docs(rows: dict[str, dict[str, Any]]) -> None:
    lines = ["| policy | seeds | accuracy, % | lost, points | allowed |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in table_rows(rows)]
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text("\n".join(lines) + "\n")


def write_planner(rows: dict[str, dict[str, Any]]) -> None:
    """What `allstep advise` tells of accuracy: of its policies, those that have several seeds."""
    own = {policy.name for policy in POLICIES} - {BASE}
    told = {name: row for name, row in rows.items() if name in own and row["num_seeds"] > 1}
    lost = {name: [round(x, 3) for x in row["lost"]] for name, row in told.items()}
    costs = {name: {"mean": mean, "std": std} for name, (mean, std) in lost.items()}
    seeds = sorted({row["num_seeds"] for row in told.values()})
    task = f"Fashion-MNIST, {EPOCHS} epochs, {'-'.join(map(str, seeds))} seeds,"
    task += f" {NUM_WORKERS} workers"
    table = {"task": task, "num_workers": NUM_WORKERS, "points_lost": costs}
    PLANNER.write_text(json.dumps(table, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch, two policies")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", choices=policies(), metavar="POLICY")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--planner", action="store_true", help=f"also write {PLANNER.name}")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, seed, epochs, run_dir = arguments.worker
        work(name, int(seed), int(epochs), Path(run_dir))
        return
    quick = arguments.quick
    file = "policy_accuracy_quick" if quick else "policy_accuracy"
    names = arguments.policies or ([BASE, "int8"] if quick else list(policies()))
    epochs = arguments.epochs or (1 if quick else EPOCHS)
    num_seeds = 0 if arguments.report else 1 if quick else arguments.seeds
    runs = run_all(names, num_seeds, epochs, RESULTS / f"{file}.jsonl")

    rows = summarize(runs)
    table = Table("policy", "seeds", "accuracy, %", "lost, points", "allowed")
    for cells in table_rows(rows):
        table.add_row(*cells)
    Console().print(table)
    if epochs == EPOCHS:
        write_docs(rows)
        if arguments.planner:
            write_planner(rows)
    write_results(file, {"epochs": epochs, "workers": NUM_WORKERS, "rows": rows, "runs": runs})
    lost = {name: row["lost"][0] for name, row in rows.items() if row["lost"] and name != BASE}
    print_headline(**{f"lost_{name}": points for name, points in lost.items()})


if __name__ == "__main__":
    main()
