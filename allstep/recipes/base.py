"""What every recipe has: the options of the loop, and how the model is optimized."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import allstep
from allstep import Communicator, Task, TrainOptions, UsageError

__all__ = ["Recipe"]


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainOptions, ABC):
    """A training as data: every field is a flag of `allstep train`.

    A recipe of your own is a frozen dataclass that derives from this one and says in
    `build` what to train; `fit(recipe.task(comm), recipe, comm, run_dir)` trains it.

    Raises:
        UsageError: if a value is out of range.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with Nesterov momentum, or AdamW."""

    lr: float = 0.1
    """Peak learning rate, for the whole global batch."""

    momentum: float = 0.9
    """SGD's momentum, or AdamW's first beta."""

    weight_decay: float = 5e-4
    """Decay of weight matrices and kernels; biases and normalisation have none."""

    lr_schedule: Literal["cosine", "poly", "constant"] = "cosine"
    """How the learning rate falls after the warm-up; poly is quadratic."""

    warmup_epochs: float = 0.0
    """Epochs in which the learning rate grows linearly to its peak."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lr > 0:
            raise UsageError(f"`lr` (={self.lr}) must be positive.")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"`momentum` (={self.momentum}) must be at least 0 and below 1.")
        if self.weight_decay < 0:
            raise UsageError(f"`weight_decay` (={self.weight_decay}) must be 0 or more.")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise UsageError(
                f"`warmup_epochs` (={self.warmup_epochs}) must be 0 or more and below `epochs`"
                f" (={self.epochs})."
            )

    def check(self) -> None:
        """Looks for what the recipe needs; cheap, meant to run before any worker starts.

        Raises:
            UsageError: if data or a package is missing; says how to get it.
        """

    @abstractmethod
    def build(self, comm: Communicator) -> Task:
        """Model, data, loss and optimizer; the random state is set from `seed` already."""

    def task(self, comm: Communicator) -> Task:
        """The task of `fit`, with the initial weights that `seed` stands for.

        Raises:
            UsageError: as `check` does.
        """
        self.check()
        torch.manual_seed(self.seed)
        return self.build(comm)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer over the model's parameters, those of one dimension without decay."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if self.optimizer == "adamw":
            return AdamW(groups, lr=self.lr, betas=(self.momentum, 0.999))
        return SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)

    def make_schedule(self, num_train_samples: int) -> Callable[[int], float]:
        """The multiplier of the learning rate over the whole run.

        Raises:
            UsageError: if there are fewer samples than one global batch and `drop_last` is set.
        """
        whole_batches, rest = divmod(num_train_samples, self.global_batch)
        steps_per_epoch = whole_batches + (rest > 0 and not self.drop_last)
        if steps_per_epoch == 0:
            raise UsageError(
                f"`global_batch` (={self.global_batch}) exceeds the training set"
                f" ({num_train_samples} samples) and `drop_last` drops what is left; lower it."
            )
        total_steps = self.epochs * steps_per_epoch
        warmup_steps = min(round(self.warmup_epochs * steps_per_epoch), total_steps - 1)
        if self.lr_schedule == "cosine":
            return allstep.optim.cosine(total_steps, warmup_steps)
        if self.lr_schedule == "poly":
            return allstep.optim.poly(total_steps, warmup_steps)
        return allstep.optim.constant(warmup_steps=warmup_steps)
