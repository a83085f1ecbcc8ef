"""How far float32 rounding alone moves parameters when the number of workers changes.

    python benchmarks/bench_rounding.py [--quick]

The same global batches in another order of summation: nothing else differs between the rows.
Prints the table of docs/tables/rounding.md and writes it there; the numbers themselves go to
benchmarks/results/bench_rounding.json (with `--quick`: ..._quick.json, and no docs).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.comm.threads import run_ranks

DOCS = Path(__file__).parent.parent / "docs" / "tables" / "rounding.md"
NUM_STEPS = (10, 40, 160)
NUM_WORKERS = (2, 3, 4, 6)
GLOBAL_BATCH, MICRO_BATCH = 96, 8


def digits(dtype: torch.dtype) -> TensorDataset:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=dtype).view(-1, 1, 8, 8) / 16
    return TensorDataset(x, torch.tensor(labels))


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    ).to(dtype)


def parameters_after(num_workers: int, dtype: torch.dtype, steps: tuple[int, ...]) -> list[Tensor]:
    """All parameters as one vector after each of the given numbers of steps."""
    initial = make_model(dtype).state_dict()
    samples = digits(dtype)

    def train(comm: Communicator) -> list[Tensor]:
        model = make_model(dtype)
        model.load_state_dict(initial)
        exchange = allstep.attach(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = allstep.data.loader(
            samples, comm, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
        )
        found: list[Tensor] = []
        while True:
            for batch in allstep.steps(loader, exchange):
                for x, y in batch:
                    batch.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if loader.step in steps:
                    found.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
                if loader.step == steps[-1]:
                    return found

    return run_ranks(num_workers, train, timeout_s=120)[0]


def measure(steps: tuple[int, ...]) -> list[dict[str, Any]]:
    """By how much the parameters of several workers differ from those of one."""
    rows = []
    for dtype in (torch.float32, torch.float64):
        alone = parameters_after(1, dtype, steps)
        for num_workers in NUM_WORKERS:
            together = parameters_after(num_workers, dtype, steps)
            moved = [
                ((a - b).norm() / a.norm()).item() for a, b in zip(alone, together, strict=True)
            ]
            name = str(dtype).removeprefix("torch.")
            rows.append({"dtype": name, "workers": num_workers, "moved": moved})
    return rows


def table(rows: Sequence[dict[str, Any]], steps: tuple[int, ...]) -> str:
    lines = [
        "| dtype | workers | " + " | ".join(f"{n} steps" for n in steps) + " |",
        "|---|---|" + "---|" * len(steps),
    ]
    for row in rows:
        cells = " | ".join(f"{m:.1e}" for m in row["moved"])
        lines.append(f"| {row['dtype']} | {row['workers']} v. 1 | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 and 40 steps only")
    is_quick = parser.parse_args().quick
    steps = NUM_STEPS[:2] if is_quick else NUM_STEPS
    torch.set_num_threads(1)
    rows = measure(steps)
    print(table(rows, steps))
    write_results(f"bench_rounding{'_quick' if is_quick else ''}", {"steps": steps, "rows": rows})
    if not is_quick:
        DOCS.write_text(table(rows, steps))


if __name__ == "__main__":
    main()
