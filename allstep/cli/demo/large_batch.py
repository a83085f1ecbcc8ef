"""Panel a: what 32 times the batch does to accuracy, and what keeps it.

[Note: how the settings were found] Each line that has something to tune had four trials of two
seeds that the panel doesn't use, on 1,149 of the 1,437 training digits; taken was what had the
least mean loss on the other 288. The test digits took no part. Linear scaling and the old rate
have nothing to tune: their rates follow from the small batch's. To do it again, in minutes:

    python benchmarks/search_demo.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from allstep.cli.demo.panel import Bar, Chart, Panel
from allstep.cli.demo.processes import Call, Processes
from allstep.comm import Communicator
from allstep.env import num_cores
from allstep.optim import LARS, NonfiniteGradientError, groups, linear_scaling
from allstep.recipes.digits import Digits
from allstep.train import fit

FACTOR = 32
SMALL_BATCH = MICRO_BATCH = 8
EPOCHS = 12
_NUM_HELD_OUT = 288


@dataclass(frozen=True, kw_only=True)
class LargeBatchDigits(Digits):
    """The recipe `digits` for this panel: a smaller net, and LARS as its paper has it."""

    width: int = 16
    epochs: int = EPOCHS
    micro_batch: int = MICRO_BATCH
    global_batch: int = FACTOR * SMALL_BATCH
    warmup_epochs: float | None = 0.0
    evaluate_every_epochs: int = EPOCHS
    checkpoint_every_steps: int = 1_000_000

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        if self.optimizer == "lars":
            parameters = groups(model, weight_decay=self.weight_decay)
            return LARS(parameters, lr=self.lr, momentum=self.momentum)
        return super().make_optimizer(model)


def train(
    comm: Communicator, fields: dict[str, Any], seed: int, *, is_trial: bool = False
) -> dict[str, float]:
    """Accuracy, 0 to 1, and loss after a whole training; a trial's on held-out samples."""
    torch.set_num_threads(1)
    recipe = LargeBatchDigits(**fields, seed=seed)
    task = recipe.task(comm)
    if is_trial:
        train_set, held_out = hold_out(task.train_set)
        schedule = recipe.make_schedule(len(train_set))
        task = replace(task, train_set=train_set, test_set=held_out, schedule=schedule)
    with TemporaryDirectory() as folder:
        try:
            report = fit(task, recipe, comm, folder)
        except NonfiniteGradientError:
            return {"accuracy": 0.0, "loss": inf}
        return dict(report.metrics)


def hold_out(train_set: Dataset[Any]) -> tuple[Subset[Any], Subset[Any]]:
    """The training digits that a trial trains on, and those that judge it."""
    num = len(train_set)  # type: ignore[arg-type]
    order = torch.randperm(num, generator=torch.Generator().manual_seed(1)).tolist()
    return Subset(train_set, order[_NUM_HELD_OUT:]), Subset(train_set, order[:_NUM_HELD_OUT])


@dataclass(frozen=True)
class Line:
    """A line of the panel.

    Args:
        name: for the table.
        fields: of the recipe, as they were found, or as they follow.
        trials: what was tried of each field to find them; nothing where they follow.
    """

    name: str
    fields: dict[str, Any]
    trials: dict[str, Sequence[float]] = field(default_factory=dict)

    @property
    def recipe(self) -> LargeBatchDigits:
        """What is trained, but for the seed."""
        return LargeBatchDigits(**self.fields)


_SMALL_LR = 0.02
_LARGE_LR = linear_scaling(_SMALL_LR, SMALL_BATCH, FACTOR * SMALL_BATCH)
_WARMUP_EPOCHS = 4.5  # of lines that have a rate to find

# [Note: how the settings were found]
LINES = (
    Line(
        "small batch",
        {"lr": _SMALL_LR, "global_batch": SMALL_BATCH},
        trials={"lr": (0.005, 0.01, 0.02, 0.05)},
    ),
    Line("linear scaling", {"lr": _LARGE_LR}),
    Line(
        "with warm-up",
        {"lr": _LARGE_LR, "warmup_epochs": 6.0},
        trials={"warmup_epochs": (1.5, 3.0, 4.5, 6.0)},
    ),
    Line("old rate", {"lr": _SMALL_LR}),
    Line(
        "AdamW",
        {"optimizer": "adamw", "lr": 0.02, "warmup_epochs": _WARMUP_EPOCHS},
        trials={"lr": (0.01, 0.02, 0.04, 0.08)},
    ),
    Line(
        "LARS",
        {"optimizer": "lars", "lr": 8.0, "warmup_epochs": _WARMUP_EPOCHS},
        trials={"lr": (2.0, 4.0, 8.0, 16.0)},
    ),
    Line(
        "LAMB",
        {
            "optimizer": "lamb",
            "lr": 0.04,
            "weight_decay": 0.01,
            "warmup_epochs": _WARMUP_EPOCHS,
        },
        trials={"lr": (0.02, 0.04, 0.08, 0.16)},
    ),
)

_COLLAPSED = 2.0  # points lost
_KEPT = 0.5


def measure(processes: Processes, folder: Path, num_seeds: int) -> Iterator[Panel]:
    """Trains every line with every seed, as many at a time as there are cores."""
    jobs = [(line, seed) for seed in range(num_seeds) for line in LINES]
    calls: list[Call] = [(train, {"fields": line.fields, "seed": seed}) for line, seed in jobs]
    accuracies: dict[str, list[float]] = {line.name: [] for line in LINES}
    yield _panel(accuracies, f"training 1 of {len(jobs)}", num_seeds)
    for num_done, (number, found) in enumerate(processes.each(calls, num_cores()), start=1):
        accuracies[jobs[number][0].name].append(100 * found["accuracy"])
        if num_done < len(jobs):
            yield _panel(accuracies, f"training {num_done + 1} of {len(jobs)}", num_seeds)
    yield _panel(accuracies, "", num_seeds)


def _panel(accuracies: dict[str, list[float]], status: str, num_seeds: int) -> Panel:
    small = accuracies[LINES[0].name]
    return Panel(
        letter="a",
        title=f"Large batch: digits, {num_seeds} seed{'s' * (num_seeds > 1)}, test accuracy",
        header=("", "batch", "rate", "warm-up", "accuracy, %", "v. small"),
        rows=[_row(line, accuracies[line.name], small) for line in LINES],
        chart=Chart(
            "test accuracy, %",
            [
                Bar(n, mean(found), spread=_spread(found))
                for n, found in accuracies.items()
                if found
            ],
            starts_at_zero=False,
        ),
        notes=_NOTES,
        status=status,
        conclusion="" if status else _conclude(accuracies),
        numbers={
            "accuracy_pct": accuracies,
            "settings": {line.name: line.fields for line in LINES},
        },
    )


_NOTES = (
    f"Same model, same {EPOCHS} epochs; batch norm sees {MICRO_BATCH} samples at a time in all"
    " lines. ± is the standard deviation over the seeds.",
    "Linear scaling and the old rate follow from the small batch's rate. All else was found in"
    " four trials a line on training digits held out, with other seeds and without the test set.",
)


def _row(line: Line, found: Sequence[float], small: Sequence[float]) -> tuple[str, ...]:
    recipe = line.recipe
    warmup = f"{recipe.warmup_epochs:g} epochs" if recipe.warmup_epochs else "none"
    cells = (line.name, f"{recipe.global_batch}", f"{recipe.lr:g}", warmup)
    if not found:
        return (*cells, "", "")
    accuracy = f"{mean(found):.1f} ± {_spread(found):.1f}" if len(found) > 1 else f"{found[0]:.1f}"
    difference = f"{mean(found) - mean(small):+.1f}" if small and line is not LINES[0] else ""
    return (*cells, accuracy, difference)


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _conclude(accuracies: dict[str, list[float]]) -> str:
    lost = {name: mean(accuracies[LINES[0].name]) - mean(a) for name, a in accuracies.items()}
    naive, warm = lost["linear scaling"], lost["with warm-up"]
    verb = "collapses" if naive > _COLLAPSED else "loses little here"
    kept = [line.name for line in LINES[2:] if lost[line.name] <= _KEPT]
    keeping = ", ".join(kept) if kept else "none of the others"
    return (
        f"{FACTOR}x the batch with {FACTOR}x the rate {verb} ({-naive:+.1f} points); with the"
        f" warm-up it is {-warm:+.1f} points from the small batch."
        f" Within {_KEPT:g} points: {keeping}."
    )
