"""One point of the study: a training of `fashion` with given settings, and what is kept of it."""

import contextlib
import io
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Subset

import allstep
from allstep import Communicator, Task
from allstep.errors import AllstepError
from allstep.optim import LAMB, LARS, NonfiniteGradientError, TrustRatio, groups
from allstep.recipes import Recipe
from allstep.recipes.fashion import Fashion
from allstep.recipes.text import Text
from allstep.train.metrics import read_metrics

__all__ = ["train"]

WIDTH = 16
NUM_HELD_OUT = 10_000
NOISE_EVERY_STEPS = 5
NUM_SHARPNESS_SAMPLES = 1024
MAX_PRODUCTS = 40  # the residual is some per cent then

_QUIET = {"log_every_steps": 50, "checkpoint_every_steps": 10**9}


@dataclass(frozen=True, kw_only=True)
class Studied(Fashion):
    """The recipe with a held-out part, fewer samples, and optimizers that it doesn't offer."""

    name: ClassVar[str] = "fashion"
    is_search: bool = False
    num_train_samples: int | None = None
    norm: str = "l2"
    is_nesterov: bool = True

    def build(self, comm: Communicator) -> Task:
        """The task on a part of the training set; a search never sees the test set."""
        task = super().build(comm)
        order = torch.randperm(60_000, generator=torch.Generator().manual_seed(1)).tolist()
        held_out = order[:NUM_HELD_OUT]
        kept = order[NUM_HELD_OUT:] if self.is_search else order
        train_set = Subset(task.train_set, kept[: self.num_train_samples])
        return replace(
            task,
            train_set=train_set,
            test_set=Subset(task.train_set, held_out) if self.is_search else task.test_set,
            schedule=self.make_schedule(len(train_set)),
        )

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """As the recipe's, but for the variants under study."""
        parameters = groups(model, weight_decay=self.weight_decay)
        if self.optimizer == "sgd" and not self.is_nesterov:
            return SGD(parameters, lr=self.lr, momentum=self.momentum)
        if self.optimizer == "lars" and self.norm != "l2":
            return LARS(
                parameters,
                self.lr,
                self.momentum,
                variant="mlperf",
                trust_ratio=TrustRatio(norm=self.norm, coefficient=0.001, eps=1e-7),
                nonfinite="propagate",
            )
        if self.optimizer == "lamb" and self.norm != "l2":
            betas = (self.momentum, 0.999)
            return LAMB(
                parameters,
                self.lr,
                betas,
                trust_ratio=TrustRatio(norm=self.norm),
                nonfinite="propagate",
            )
        return super().make_optimizer(model)


def train(point: Mapping[str, Any]) -> dict[str, Any]:
    """Trains a point in this process, on one thread.

    Args:
        point: `batch`, `epochs`, `seed`, `settings` (fields of the recipe), `is_search`,
            `num_train_samples`, `width`, `measures` (noise scale and sharpness as well); or
            `texts`, a folder, in place of the last four, for the recipe `text`.

    Returns:
        Accuracy and loss (None for both if the run came to NaN), steps, seconds; with `measures`
        also (step, accuracy) after each epoch, noise scale and sharpness.
    """
    torch.set_num_threads(1)
    recipe = _text(point) if "texts" in point else _fashion(point)
    start_s = time.perf_counter()
    with contextlib.closing(Communicator.single_process()) as comm:
        task = recipe.task(comm)
        result = _fit(task, recipe, comm)
        if point["measures"] and result["accuracy"] is not None:
            result |= _sharpness(task, comm)
    return result | {"seconds": time.perf_counter() - start_s}


def _fashion(point: Mapping[str, Any]) -> Recipe:
    settings = dict(point["settings"])
    if settings["optimizer"] == "momentum":
        settings |= {"optimizer": "sgd", "is_nesterov": False}
    return Studied(
        epochs=point["epochs"],
        global_batch=point["batch"],
        micro_batch=32,
        seed=point["seed"],
        width=point["width"],
        channels_last=True,
        is_search=point["is_search"],
        num_train_samples=point["num_train_samples"],
        noise_scale_every_steps=NOISE_EVERY_STEPS if point["measures"] else 0,
        evaluate_every_epochs=1 if point["measures"] else point["epochs"],
        **_QUIET,
        **settings,
    )


def _text(point: Mapping[str, Any]) -> Recipe:
    """Hidden tokens, in two stages: the last epoch on sequences four times as long."""
    return Text(
        folder=Path(point["texts"]),
        objective="masked",
        epochs=point["epochs"],
        global_batch=point["batch"],
        seed=point["seed"],
        evaluate_every_epochs=point["epochs"],
        second_sequence_length=4 * Text.sequence_length,
        second_global_batch=point["batch"] // 2,
        **_QUIET,
        **point["settings"],
    )


def _fit(task: Task, recipe: Recipe, comm: Communicator) -> dict[str, Any]:
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            report = allstep.fit(task, recipe, comm, Path(folder))
            records = read_metrics(folder)
    except NonfiniteGradientError as error:
        return {"accuracy": None, "loss": None, "steps": None, "error": str(error)}
    loss = report.metrics["loss"]
    return {
        "accuracy": report.metrics["accuracy"],
        "loss": loss if math.isfinite(loss) else None,
        "steps": report.num_steps,
        "curve": [[r["step"], r["test/accuracy"]] for r in records if "test/accuracy" in r],
        "noise_scale": report.noise_scale,
        "mean_noise_scale": report.mean_noise_scale,
    }


def _sharpness(task: Task, comm: Communicator) -> dict[str, Any]:
    from allstep.train.sharpness import sharpness

    loader = allstep.data.loader(
        task.train_set, comm, global_batch=NUM_SHARPNESS_SAMPLES, micro_batch=256
    )
    batch = next(loader.global_batches())
    try:
        measured = sharpness(
            task.model, task.loss, batch, comm, max_products=MAX_PRODUCTS, tolerance=1e-2
        )
    except AllstepError as error:  # no minimum is near weights whose loss isn't finite
        return {"top_eigenvalue": None, "sharpness_error": str(error)}
    return {
        "top_eigenvalue": measured.top_eigenvalue,
        "residual": measured.residual,
        "loss_rise": measured.loss_rise,
    }
