"""How far float32 rounding alone moves parameters when the number of workers changes.

    python benchmarks/bench_rounding.py [--quick] [--fashion]

The same global batches in another order of summation: nothing else differs between the rows. The
cases are the recipe `digits` (and `fashion`) as shipped but for `compression`, and `digits` under
Adadelta at a rate of 1.0, falling by 0.7 an epoch, as in PyTorch's MNIST example. Workers are
threads of one process. Prints the table of docs/tables/rounding.md and writes it there; the numbers
themselves go to benchmarks/results/bench_rounding.json (with `--quick`: ..._quick.json, no docs).
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import Tensor, nn

from allstep import Communicator
from allstep.comm.threads import run_ranks
from allstep.recipes import REGISTRY, Recipe
from allstep.train import Task
from allstep.train.run import Run

DOCS = Path(__file__).parent.parent / "docs" / "tables" / "rounding.md"
STEPS = (60, 600)  # and all
WORKERS = {"fp32": (2, 3), "exact": (3,)}

Change = Callable[[Recipe, Task], Task]


def as_shipped(_: Recipe, task: Task) -> Task:
    return task


def with_adadelta(recipe: Recipe, task: Task) -> Task:
    """At the rate of PyTorch's MNIST example."""
    assert hasattr(task.train_set, "__len__")
    steps_per_epoch = recipe.steps_per_epoch(len(task.train_set))
    return replace(
        task,
        optimizer=lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0),
        schedule=lambda step: 0.7 ** (step // steps_per_epoch),
    )


CASES: dict[str, tuple[str, dict[str, Any], Change]] = {
    "digits": ("digits", {}, as_shipped),
    "digits, Adadelta 1.0": ("digits", {"epochs": 40}, with_adadelta),
    "fashion": ("fashion", {}, as_shipped),
}


def parameters_after(
    case: str, compression: str, num_workers: int, num_steps: int | None
) -> dict[str, Tensor]:
    """Steps -> all parameters as one vector; "all" is the end of the training."""
    name, fields, change = CASES[case]
    recipe: Recipe = REGISTRY[name](compression=compression, threads=1, **fields)

    def train(comm: Communicator) -> dict[str, Tensor]:
        task = change(recipe, recipe.task(comm))
        found: dict[str, Tensor] = {}

        def keep(when: str) -> None:
            found[when] = nn.utils.parameters_to_vector(task.model.parameters()).detach().clone()

        with closing(Run(task, recipe, comm)) as run:
            while run.epoch < recipe.epochs:
                run.begin_epoch()
                for _ in run.updates():
                    if run.step in STEPS:
                        keep(str(run.step))
                    if run.step == num_steps:
                        return found
            keep(f"all {run.step}")
        return found

    return run_ranks(num_workers, train, timeout_s=3600)[0]


def measure(cases: Sequence[str], num_steps: int | None) -> list[dict[str, Any]]:
    """By how much the parameters of several workers differ from those of one."""
    rows = []
    for case in cases:
        for compression, counts in WORKERS.items():
            alone = parameters_after(case, compression, 1, num_steps)
            for count in counts:
                together = parameters_after(case, compression, count, num_steps)
                moved = {
                    when: float((x - together[when]).norm() / x.norm()) for when, x in alone.items()
                }
                rows.append(
                    {"case": case, "compression": compression, "workers": count, "moved": moved}
                )
                print(rows[-1], flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| training | sums | workers | 60 steps | 600 steps | all steps |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        moved = dict(row["moved"])
        cells = [moved.pop(str(steps), None) for steps in STEPS]
        last, value = moved.popitem() if moved else ("", None)
        shown = [
            *(_shown(cell) for cell in cells),
            f"{_shown(value)} ({last.removeprefix('all ')})",
        ]
        head = [row["case"], row["compression"], f"{row['workers']} v. 1"]
        lines.append(f"| {' | '.join([*head, *shown])} |")
    return "\n".join(lines) + "\n"


def _shown(moved: float | None) -> str:
    return "" if moved is None else "0" if moved == 0 else f"{moved:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="60 steps of digits only")
    parser.add_argument("--fashion", action="store_true", help="the recipe fashion, too; an hour")
    known = parser.parse_args()
    cases = ["digits"] if known.quick else list(CASES)[: 3 if known.fashion else 2]
    rows = measure(cases, STEPS[0] if known.quick else None)
    print(table(rows))
    write_results(f"bench_rounding{'_quick' if known.quick else ''}", {"rows": rows})
    if not known.quick:
        DOCS.write_text(table(rows))


if __name__ == "__main__":
    main()
