"""The trainings of the large-batch panel, and the settings that were found for them.

[Note: how the settings were found] Each line that has something to tune had four trials of two
seeds that the panel doesn't use, on 1,149 of the 1,437 training digits; taken was what had the
least mean loss on the other 288. The test digits took no part. Linear scaling and the old rate
have nothing to tune: their rates follow from the small batch's. To do it again, in minutes:

    python benchmarks/search_demo.py
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil, inf
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Subset, TensorDataset

from allstep.comm import Communicator
from allstep.optim import LAMB, LARS, NonfiniteGradientError, cosine, groups, linear_scaling
from allstep.recipes.classification import Classifier
from allstep.recipes.digits import digits_net, load_digits
from allstep.train import Task, TrainOptions, fit

__all__ = ["EPOCHS", "FACTOR", "LINES", "MICRO_BATCH", "Line", "Settings", "train"]

FACTOR = 32
SMALL_BATCH = MICRO_BATCH = 8
EPOCHS = 12
_WIDTH = 16
_MOMENTUM = 0.9
_NUM_HELD_OUT = 288


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the digits are trained."""

    lr: float
    rule: Literal["sgd", "adamw", "lars", "lamb"] = "sgd"
    weight_decay: float = 5e-4
    warmup_epochs: float = 0.0
    global_batch: int = FACTOR * SMALL_BATCH

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The rule; biases and batch norm are neither decayed nor adapted."""
        parameters = groups(model, weight_decay=self.weight_decay)
        if self.rule == "adamw":
            return AdamW(parameters, lr=self.lr)
        if self.rule == "lars":
            return LARS(parameters, lr=self.lr, momentum=_MOMENTUM)
        if self.rule == "lamb":
            return LAMB(parameters, lr=self.lr)
        return SGD(parameters, lr=self.lr, momentum=_MOMENTUM, nesterov=True)

    def make_task(self, train_set: Any, test_set: Any) -> Task:
        """Model, data and a cosine schedule after the warm-up."""
        classifier = Classifier(mean=[4.88], std=[6.02])
        steps_per_epoch = ceil(len(train_set) / self.global_batch)
        return Task(
            model=digits_net(_WIDTH),
            train_set=train_set,
            test_set=test_set,
            loss=classifier.loss,
            metrics=classifier.metrics,
            optimizer=self.make_optimizer,
            schedule=cosine(EPOCHS * steps_per_epoch, round(self.warmup_epochs * steps_per_epoch)),
        )


def train(settings: Settings, seed: int, *, is_trial: bool = False) -> dict[str, float]:
    """Accuracy, 0 to 1, and loss after a whole training; a trial's on held-out samples."""
    train_set, test_set = load_digits()
    torch.manual_seed(seed)
    task = settings.make_task(*(_hold_out(train_set) if is_trial else (train_set, test_set)))
    options = TrainOptions(
        epochs=EPOCHS,
        global_batch=settings.global_batch,
        micro_batch=MICRO_BATCH,
        seed=seed,
        evaluate_every_epochs=EPOCHS,
        checkpoint_every_steps=1_000_000,
    )
    with closing(Communicator.single_process()) as comm, TemporaryDirectory() as folder:
        try:
            report = fit(task, options, comm, folder)
        except NonfiniteGradientError:
            return {"accuracy": 0.0, "loss": inf}
        return dict(report.metrics)


def _hold_out(train_set: TensorDataset) -> tuple[Subset[Any], Subset[Any]]:
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(1)).tolist()
    return Subset(train_set, order[_NUM_HELD_OUT:]), Subset(train_set, order[:_NUM_HELD_OUT])


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the panel.

    Args:
        name: for the table.
        settings: as they were found, or as they follow.
        trials: what was tried of each field to find them; nothing where they follow.
    """

    name: str
    settings: Settings
    trials: dict[str, Sequence[float]]


_SMALL_LR = 0.02
_LARGE_LR = linear_scaling(_SMALL_LR, SMALL_BATCH, FACTOR * SMALL_BATCH)
_WARMUP_EPOCHS = 4.5  # of lines that have a rate to find

# [Note: how the settings were found]
LINES = (
    Line(
        name="small batch",
        settings=Settings(lr=_SMALL_LR, global_batch=SMALL_BATCH),
        trials={"lr": (0.005, 0.01, 0.02, 0.05)},
    ),
    Line(name="linear scaling", settings=Settings(lr=_LARGE_LR), trials={}),
    Line(
        name="with warm-up",
        settings=Settings(lr=_LARGE_LR, warmup_epochs=6.0),
        trials={"warmup_epochs": (1.5, 3.0, 4.5, 6.0)},
    ),
    Line(name="old rate", settings=Settings(lr=_SMALL_LR), trials={}),
    Line(
        name="AdamW",
        settings=Settings(rule="adamw", lr=0.02, warmup_epochs=_WARMUP_EPOCHS),
        trials={"lr": (0.01, 0.02, 0.04, 0.08)},
    ),
    Line(
        name="LARS",
        settings=Settings(rule="lars", lr=8.0, warmup_epochs=_WARMUP_EPOCHS),
        trials={"lr": (2.0, 4.0, 8.0, 16.0)},
    ),
    Line(
        name="LAMB",
        settings=Settings(rule="lamb", lr=0.04, weight_decay=0.01, warmup_epochs=_WARMUP_EPOCHS),
        trials={"lr": (0.02, 0.04, 0.08, 0.16)},
    ),
)
