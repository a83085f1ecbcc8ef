"""What every recipe has: the options of the loop, and how the model is optimized."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

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
    warmup_share: ClassVar[float] = 0.0
    """Of `epochs`, where `warmup_epochs` is left out."""

    optimizer: Literal["sgd", "adamw", "lars", "lamb", "rmsprop_warmup"] = "sgd"
    """SGD with Nesterov momentum, AdamW, LARS (MLPerf's form), LAMB, or RMSprop turning SGD."""

    lr: float = 0.1
    """Peak learning rate, for the whole global batch."""

    momentum: float = 0.9
    """SGD's momentum, or AdamW's and LAMB's first beta."""

    weight_decay: float = 5e-4
    """Decay of weight matrices and kernels; biases and normalisation have none."""

    lr_schedule: Literal["cosine", "poly", "linear", "step", "slow_start", "constant"] = "cosine"
    """How the rate falls after the warm-up; poly is quadratic, step is a tenth three times."""

    warmup_epochs: float | None = None
    """Epochs in which the rate grows linearly; rmsprop_warmup's until half of it is SGD. By default
    the recipe's usual share of `epochs`."""

    warmup_start: float = 0.0
    """Where the growing rate begins, as a share of its peak."""

    last_statistics: bool = False
    """Evaluate batch norm with the last step's statistics instead of their moving average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        warmup_epochs = self.settings.warmup_epochs  # settings check their own
        if not 0 <= warmup_epochs < self.epochs:
            raise UsageError(
                f"`warmup_epochs` (={warmup_epochs}) must be 0 or more and below `epochs`"
                f" (={self.epochs})."
            )

    @property
    def settings(self) -> allstep.optim.Settings:
        """Optimizer, rate and schedule."""
        usual_warmup = self.warmup_share * self.epochs
        return allstep.optim.Settings(
            optimizer=self.optimizer,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            lr_schedule=self.lr_schedule,
            warmup_epochs=usual_warmup if self.warmup_epochs is None else self.warmup_epochs,
            warmup_start=self.warmup_start,
            second=self.second_stage,
        )

    @property
    def second_stage(self) -> allstep.optim.SecondStage | None:
        """How the rate goes in a second stage with other batches, for recipes that have one."""
        return None

    def with_second_stage(
        self, mixed: allstep.optim.MixedBatch, second: allstep.optim.SecondStage
    ) -> "Recipe":
        """This recipe with a second stage of longer sequences.

        Raises:
            UsageError: if its samples have no length that could change.
        """
        raise UsageError(
            f"Recipe `{self.name}` has no sequences that could grow in a second stage; `text` has."
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
        task = self.build(comm)
        if self.optimizer == "rmsprop_warmup":  # it counts its transition in steps
            task = replace(task, optimizer=self._rmsprop_warmup(task))
        if self.last_statistics:
            allstep.nn.keep_last_statistics(task.model)
        return task

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer over the model's parameters; biases and normalisation have no decay.

        It looks at no gradient: the training step does, by the option `nonfinite`.
        """
        return self.settings.make_optimizer(model, nonfinite="propagate")

    def make_schedule(
        self, num_train_samples: int, num_second_samples: int | None = None
    ) -> Callable[[int], float]:
        """The multiplier of the learning rate over the whole run.

        Args:
            num_train_samples: of an epoch.
            num_second_samples: of an epoch of the second stage, if there is one.

        Raises:
            UsageError: if there are fewer samples than one global batch and `drop_last` is set.
        """
        second_steps = None
        if num_second_samples is not None:
            second_steps = self.steps_per_epoch(num_second_samples, self.second_batch)
        return self.settings.make_schedule(
            epochs=self.epochs,
            steps_per_epoch=self.steps_per_epoch(num_train_samples),
            second_steps_per_epoch=second_steps,
        )

    def _rmsprop_warmup(self, task: Task) -> Callable[[nn.Module], Optimizer]:
        if not isinstance(task.train_set, Sized):
            raise UsageError(
                f"`optimizer` (={self.optimizer!r}) needs a training set with a length; a stream"
                " has none."
            )
        steps = self.steps_per_epoch(len(task.train_set))
        return partial(self.settings.make_optimizer, steps_per_epoch=steps, nonfinite="propagate")

    @property
    def second_batch(self) -> int:
        """Samples of a step in the second stage."""
        return self.global_batch

    def steps_per_epoch(self, num_train_samples: int, global_batch: int | None = None) -> int:
        """Optimizer steps of an epoch; of `global_batch` samples each, the recipe's own if None.

        Raises:
            UsageError: if there is none, as `drop_last` drops the only one.
        """
        global_batch = self.global_batch if global_batch is None else global_batch
        whole_batches, rest = divmod(num_train_samples, global_batch)
        num_steps = whole_batches + (rest > 0 and not self.drop_last)
        if num_steps == 0:
            raise UsageError(
                f"`global_batch` (={global_batch}) exceeds the training set"
                f" ({num_train_samples} samples) and `drop_last` drops what is left; lower it."
            )
        return num_steps
