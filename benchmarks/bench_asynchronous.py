"""What asynchronous training costs in accuracy and brings in time: the recipe `fashion`.

    python benchmarks/bench_asynchronous.py [--quick] [--seeds 3] [--rows NAME ...]
    python benchmarks/bench_asynchronous.py --report          # of the runs that there are

Processes of one thread train by each policy of `attach` and by a parameter server
(`allstep train fashion --parameter-server`) on a fifth of the samples (`--train-share`) for five
epochs (`--epochs`), with as many updates of as many samples and the same rates. Every run that
ends is a line of benchmarks/results/asynchronous.jsonl, and is not run again. Writes
bench_asynchronous.json there and docs/tables/asynchronous.md. "Lost" is the mean over the seeds of
the difference to the synchronous run with the same seed, in points; "time" is the whole command's
over the synchronous one's, and not in the documentation: it means something only on a machine
without other work. More workers than cores take turns: they are there for their staleness.
`--quick`: one seed, two rows, one epoch, in *_quick.*, no docs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_policy_accuracy import ROOT, Studied, mean_and_std, read_runs
from common import RESULTS, circumstances, print_headline, write_results
from network import run_on_one_host
from rich.console import Console
from rich.table import Table

import allstep
from allstep import ExchangePolicy, LocalSGD, Stale, Synchronous
from allstep.files import write_json

BASE = "synchronous"
DOCS = ROOT / "docs" / "tables" / "asynchronous.md"
HEADER = ("training", "workers", "seeds", "staleness, mean", "accuracy, %", "lost, points", "time")


@dataclass(frozen=True)
class Row:
    """A way to train: by a policy of `attach`, or by a parameter server."""

    num_workers: int = 2
    policy: ExchangePolicy | None = None
    server: str = "plain"


def rows() -> dict[str, Row]:
    """Every way of the study."""
    found = {
        BASE: Row(policy=Synchronous()),
        "staleness 1": Row(policy=Stale()),
        "local SGD, H = 16": Row(policy=LocalSGD(sync_every=16, average_optimizer_state=True)),
    }
    found["parameter server, in turn"] = Row(server="in_turn")  # the control
    for num_workers in (2, 4, 8):
        found[f"asynchronous, {num_workers}"] = Row(num_workers)
    for num_workers in (4, 8):
        name = f"asynchronous, rate / staleness, {num_workers}"
        found[name] = Row(num_workers, server="staleness_aware")
    return found


def train(name: str, seed: int, epochs: int, train_share: float) -> dict[str, Any]:
    """One run; what is kept of it."""
    row = rows()[name]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "run" / "report.json"
        command: list[Any] = [sys.executable, "-m", "allstep", "train", "fashion"]
        command += ["--parameter-server", row.server, "--seed", seed, "--epochs", epochs]
        command += ["--train-share", train_share, "--run-dir", report.parent]
        if row.policy is not None:
            command = [
                sys.executable,
                __file__,
                "--worker",
                name,
                seed,
                epochs,
                train_share,
                folder,
            ]
        start_s = time.perf_counter()
        run_on_one_host(row.num_workers, command, timeout_s=3600)
        seconds = time.perf_counter() - start_s
        found = json.loads(report.read_text())
    return {
        "row": name,
        "seed": seed,
        "epochs": epochs,
        "train_share": train_share,
        "seconds": seconds,
        "accuracy": found["metrics"]["accuracy"],
        **({"staleness": found["staleness"]} if row.policy is None else {}),
        "date": circumstances()["date"],
    }


def work(name: str, seed: int, epochs: int, train_share: float, folder: Path) -> None:
    """The life of a worker that exchanges by a policy."""
    with allstep.init(device="cpu") as comm:
        policy = rows()[name].policy
        assert policy is not None
        recipe = Studied(
            seed=seed,
            epochs=epochs,
            train_share=train_share,
            policy=policy,
            evaluate_every_epochs=epochs,
        )
        done = allstep.fit(recipe.task(comm), recipe, comm, folder / "run")
        if comm.rank == 0:
            write_json(folder / "run" / "report.json", {"metrics": done.metrics})


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Row -> its means and standard deviations over the seeds, of those that have a base."""
    base = {run["seed"]: run for run in runs if run["row"] == BASE}
    found = {}
    for name, row in rows().items():
        own = [run for run in runs if run["row"] == name and run["seed"] in base]
        if own:
            pairs = [(run, base[run["seed"]]) for run in own]
            lost = [100 * (other["accuracy"] - run["accuracy"]) for run, other in pairs]
            found[name] = {
                "workers": row.num_workers,
                "num_seeds": len(own),
                "staleness": statistics.mean(map(mean_staleness, own)),
                "accuracy": mean_and_std([100 * run["accuracy"] for run in own]),
                "lost": mean_and_std(lost),
                "time": mean_and_std([run["seconds"] / other["seconds"] for run, other in pairs]),
            }
    return found


def mean_staleness(run: Mapping[str, Any]) -> float:
    """Of a run's updates; what a policy says where none was counted."""
    if "staleness" not in run:
        policy = rows()[run["row"]].policy
        return 0.0 if policy is None else float(policy.staleness)
    counts = {int(late): count for late, count in run["staleness"].items()}
    return sum(late * count for late, count in counts.items()) / sum(counts.values())


def table_cells(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A line of words for each row."""
    lines = []
    for name, row in found.items():
        cells = [name, row["workers"], row["num_seeds"], f"{row['staleness']:.2f}"]
        spread = row["num_seeds"] > 1
        for key in ("accuracy", "lost", "time"):
            mean, std = row[key]
            cells.append(f"{mean:.2f} ± {std:.2f}" if spread else f"{mean:.2f}")
        lines.append(list(map(str, cells)))
    return lines


def write_docs(found: Mapping[str, Mapping[str, Any]]) -> None:
    lines = [HEADER, ["---"] * len(HEADER), *table_cells(found)]
    lines = [line[:-1] for line in lines]  # without the time
    DOCS.write_text("".join("| " + " | ".join(cells) + " |\n" for cells in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, two rows, one epoch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=rows(), metavar="NAME")
    parser.add_argument("--epochs", type=int, help="by default 5")
    parser.add_argument("--train-share", type=float, default=0.2, help="by default 0.2")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        name, seed, epochs, share, folder = flags.worker
        work(name, int(seed), int(epochs), float(share), Path(folder))
        return
    ending = "_quick" if flags.quick else ""
    path = RESULTS / f"asynchronous{ending}.jsonl"
    names = flags.rows or ([BASE, "asynchronous, 2"] if flags.quick else list(rows()))
    setting = {
        "epochs": flags.epochs or (1 if flags.quick else 5),
        "train_share": flags.train_share,
    }
    runs = [run for run in read_runs(path) if setting.items() <= run.items()]
    done = {(run["row"], run["seed"]) for run in runs}
    for seed in range(0 if flags.report else 1 if flags.quick else flags.seeds):
        for name in names:
            if (name, seed) not in done:
                run = train(name, seed, **setting)
                print(
                    f"{name}, seed {seed}: {run['accuracy']:.2%}, {run['seconds']:.0f} s",
                    flush=True,
                )
                runs.append(run)
                with path.open("a") as file:
                    file.write(json.dumps(run) + "\n")
    found = summarize(runs)
    table = Table(*HEADER)
    for cells in table_cells(found):
        table.add_row(*cells)
    Console().print(table)
    if not flags.quick:
        write_docs(found)
    write_results(f"bench_asynchronous{ending}", {**setting, "rows": found})
    print_headline(**{f"lost_{name}": row["lost"][0] for name, row in found.items()})


if __name__ == "__main__":
    main()
