"""How far rounding alone moves the parameters when the number of workers changes.

    python benchmarks/bench_rounding.py [--quick]

Whole trainings of the recipes as they are shipped, and with float32 sums; then at high rates. Of
one case only the number of workers differs; each computes with one thread. Prints the table of
docs/tables/rounding.md and writes it there, and the numbers to
benchmarks/results/bench_rounding.json (with `--quick`: ..._quick.json, and no docs). Ends with one
line of JSON: `moved_exact`, the largest difference with exact sums, and `moved_fp32`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import print_headline, write_results
from torch import Tensor

from allstep import Communicator
from allstep.train import Checkpoints, read_checkpoint

DOCS = Path(__file__).parent.parent / "docs" / "tables" / "rounding.md"
EVERY = 60  # steps
COLUMNS = (60, 600)  # steps; the last step is another


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        name: in the table.
        arguments: of `allstep train`.
        num_workers: that are compared with one.
    """

    name: str
    arguments: tuple[str, ...]
    num_workers: tuple[int, ...]


FP32 = ("--compression", "fp32")
# The rate is 8 times the recipe's; twice as long.
HIGH = ("digits", "--lr", "0.8", "--epochs", "60")
CASES = (
    Case("`digits` as shipped", ("digits",), (2, 3, 4, 7)),
    Case("`digits`, float32 sums", ("digits", *FP32), (2, 3, 4, 7)),
    Case("`digits` at a high rate", HIGH, (2, 3)),
    Case("`digits` at a high rate, float32 sums", (*HIGH, *FP32), (2, 3)),
    Case("`fashion` as shipped", ("fashion",), (2, 3, 4, 7)),
    Case("`fashion`, float32 sums", ("fashion", *FP32), (2, 3)),
)
QUICK = (
    Case("`digits` as shipped", ("digits", "--epochs", "5"), (2,)),
    Case("`digits`, float32 sums", ("digits", "--epochs", "5", *FP32), (2,)),
)


@dataclass(frozen=True)
class Run:
    """A finished training: its parameters and buffers by step, and its last evaluation."""

    states: dict[int, Tensor]
    accuracy: float

    def moved_from(self, other: "Run") -> dict[int, float]:
        """By step, the norm of the difference over the norm."""
        return {
            step: ((state - other.states[step]).norm() / other.states[step].norm()).item()
            for step, state in self.states.items()
        }


def train(case: Case, num_workers: int) -> Run:
    """Trains in processes of its own and reads the checkpoints."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        flags = ("--checkpoint-every-steps", str(EVERY), "--keep-checkpoints", "1000")
        command = [sys.executable, "-m", "allstep", "train", *case.arguments, *flags]
        command += ["--workers", str(num_workers), "--threads", "1", "--run-dir", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        checkpoints = Checkpoints(folder / "checkpoints", Communicator.single_process())
        steps = sorted(checkpoints.saved_steps())
        kept = [step for step in steps if step in COLUMNS or step == steps[-1]]
        states = {step: model_of(read_checkpoint(checkpoints.path(step))) for step in kept}
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        accuracies = [
            row["test/accuracy"] for row in map(json.loads, lines) if "test/accuracy" in row
        ]
    return Run(states, accuracies[-1])


def model_of(state: dict[str, Any]) -> Tensor:
    """All parameters and buffers of a checkpoint, as one vector."""
    return torch.cat([x.double().flatten() for x in state["model"].values()])


def measure(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """By how much the parameters of several workers differ from those of one."""
    rows = []
    for case in cases:
        alone = train(case, 1)
        for num_workers in case.num_workers:
            together = train(case, num_workers)
            rows.append(
                {
                    "case": case.name,
                    "arguments": case.arguments,
                    "workers": num_workers,
                    "moved": together.moved_from(alone),
                    "accuracy": together.accuracy,
                    "accuracy_alone": alone.accuracy,
                }
            )
            print(line(rows[-1]), flush=True)
    return rows


HEADER = "| training | workers | 60 steps | 600 steps | all steps | accuracy | of one worker |"


def line(row: dict[str, Any]) -> str:
    """Of the table."""
    moved = row["moved"]
    last = max(moved)
    cells = [row["case"], f"{row['workers']} v. 1"]
    cells += [number(moved[step]) if step in moved else "" for step in COLUMNS]
    cells += [f"{number(moved[last])} ({last:,})"]
    cells += [f"{100 * row[key]:.2f} %" for key in ("accuracy", "accuracy_alone")]
    return f"| {' | '.join(cells)} |"


def number(moved: float) -> str:
    return f"{moved:.1e}" if moved else "0"


def table(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join([HEADER, "|---" * HEADER.count(" | ") + "|---|", *map(line, rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="five epochs of digits, two workers")
    is_quick = parser.parse_args().quick
    rows = measure(QUICK if is_quick else CASES)
    write_results(f"bench_rounding{'_quick' if is_quick else ''}", {"rows": rows})
    if not is_quick:
        DOCS.write_text(table(rows))
    largest = {"moved_exact": 0.0, "moved_fp32": 0.0}
    for row in rows:
        key = "moved_fp32" if "fp32" in row["arguments"] else "moved_exact"
        largest[key] = max(largest[key], *row["moved"].values())
    print_headline(**largest)


if __name__ == "__main__":
    main()
