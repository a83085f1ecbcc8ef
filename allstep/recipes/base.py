"""The base classes of recipes: name, checks, optimizer settings, and how a recipe is run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

import allstep
from allstep import Communicator, Metrics, Task, TrainOptions, UsageError


def package_folder(recipe: str, module: str, distribution: str) -> Path:
    """The folder of an installed package, for its data files; the package isn't imported.

    Args:
        recipe: name of the recipe that needs it.
        module: the package's name in Python.
        distribution: its name for pip.

    Raises:
        UsageError: if it isn't installed; the message says what to install.
    """
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"Recipe `{recipe}` needs {distribution}: pip install {distribution}.")
    return Path(spec.submodule_search_locations[0])


def names_kept(kind: str, names: Sequence[str]) -> dict[str, str]:
    """A hash of a model's words or classes, in the order of their numbers, for `Task.kept`.

    >>> names_kept("vocabulary", ["a", "b"]) == names_kept("vocabulary", ["b", "a"])
    False
    """
    return {kind: blake2b(repr(list(names)).encode(), digest_size=8).hexdigest()}


class Objective(Protocol):
    """The loss and the metrics of a model; see `allstep.Task`."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, float | Tensor]: ...

    def metrics(self, model: nn.Module, batch: Any) -> Metrics: ...


@dataclass(frozen=True, kw_only=True)
class _Named:
    """The base of recipes: a frozen dataclass whose fields are flags of `allstep train`."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def check(self) -> None:
        """Checks for the data and packages that the recipe needs; fast, runs before workers start.

        Raises:
            UsageError: if data or a package is missing; the message says how to get it.
        """

    def check_workers(self, num_workers: int) -> None:
        """Checks that `num_workers` workers can train the recipe; fast, before they do any work.

        Args:
            num_workers: number of all workers.

        Raises:
            UsageError: if they can't; the message says how many can.
        """

    @property
    def copy_size(self) -> int:
        """Number of workers that share a copy of the model, if there are several workers."""
        return 1

    @property
    def divides_model(self) -> bool:
        """Whether a worker holds only a part of the model, which is lost with it."""
        return False

    @property
    def trains_itself(self) -> str | None:
        """What `run` does that `allstep.fit` doesn't, as a phrase; None if `fit` trains it."""
        return None

    def run(self, comm: Communicator, run_dir: Path, *, resume: bool) -> int:
        """Trains, or continues from the newest checkpoint, and writes `report.json`.

        Args:
            comm: the workers; each of them must call this.
            run_dir: the run's folder, which exists.
            resume: whether to continue.

        Returns:
            The exit code: 0, or 128 + the signal that ended the run after a checkpoint.
        """
        raise NotImplementedError(f"Recipe `{self.name}` is trained by `allstep.fit`.")

    def data_paths(self) -> list[Path]:
        """Files and folders that the training reads; by default all fields that are paths."""
        values = (getattr(self, field.name) for field in fields(cast(Any, self)))
        return [value for value in values if isinstance(value, Path)]

    def describe(self) -> str:
        """The text that `allstep train` prints first, such as the model's size; by default ""."""
        return ""

    def need_package(self, module: str, distribution: str) -> None:
        """Raises UsageError, which says what to install, if there is no such module."""
        package_folder(self.name, module, distribution)


@dataclass(frozen=True, kw_only=True)
class DividedRecipe(_Named, ABC):
    """A recipe that trains by its own `run`, with a model that is divided among the workers.

    `Recipe` is for data parallelism, where the samples of a batch are divided among workers. Here
    the model is, and each worker processes every sample.
    """

    @property
    def divides_model(self) -> bool:
        return True

    @property
    def trains_itself(self) -> str:
        return "divides its model over the workers"

    @abstractmethod
    def run(self, comm: Communicator, run_dir: Path, *, resume: bool) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Recipe(_Named, TrainOptions, ABC):
    """A data-parallel training.

    Your own recipe is a frozen dataclass that derives from this one and whose `build` returns the
    task; `fit(recipe.task(comm), recipe, comm, run_dir)` trains it.

    Raises:
        UsageError: if a value is out of range.
    """

    warmup_share: ClassVar[float] = 0.0
    """The default of `warmup_epochs` as a share of `epochs`."""

    optimizer: allstep.optim.OptimizerName = "sgd"
    """SGD with Nesterov momentum, AdamW, LARS (MLPerf's form), LAMB, or RMSprop turning to SGD."""

    lr: float = 0.1
    """Peak learning rate, for the whole global batch."""

    momentum: float = 0.9
    """SGD's momentum, or AdamW's and LAMB's first beta."""

    weight_decay: float = 5e-4
    """Weight decay of matrices and kernels; biases and normalisation have none."""

    lr_schedule: allstep.optim.ScheduleName = "cosine"
    """How the rate falls after the warm-up: poly quadratically, step to a tenth three times."""

    warmup_epochs: float | None = None
    """Epochs in which the rate grows linearly; for rmsprop_warmup, epochs until half of the update
    is SGD's. By default the recipe's usual share of `epochs`."""

    warmup_start: float = 0.0
    """Learning rate at the start of the warm-up, as a share of its peak."""

    train_share: float = 1.0
    """Share of the training set to train on: the same samples on any number of workers, chosen by
    `seed`; larger shares contain the samples of smaller ones."""

    last_statistics: bool = False
    """Evaluate batch norm with the last step's statistics instead of their moving average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allstep.errors.check_share(
            "train_share", self.train_share, "(0, 1]", "1 is the whole training set"
        )
        warmup_epochs = self.settings.warmup_epochs  # `Settings` checks its own fields
        if not 0 <= warmup_epochs < self.epochs:
            raise UsageError(
                f"`warmup_epochs` (={warmup_epochs}) must be 0 or more and below `epochs`"
                f" (={self.epochs})."
            )

    @property
    def settings(self) -> allstep.optim.Settings:
        """Settings of the optimizer, the learning rate and the schedule."""
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
        """The schedule of a second stage with a different batch; None if the recipe has none."""
        return None

    def with_second_stage(
        self, mixed: allstep.optim.MixedBatch, second: allstep.optim.SecondStage
    ) -> "Recipe":
        """This recipe with a second stage of longer sequences.

        Raises:
            UsageError: if its samples aren't sequences.
        """
        raise UsageError(
            f"Recipe `{self.name}` has no sequences that could grow in a second stage; `text` has."
        )

    @property
    def transformer(self) -> "allstep.plan.TransformerSpec | None":
        """The blocks that tensor parallelism divides; None if the model has none."""
        return None

    def divided_layers(self, model: nn.Module) -> tuple[Sequence[nn.Module], Sequence[nn.Module]]:
        """The layers whose compute tensor parallelism divides; by default none.

        Args:
            model: the recipe's model.

        Returns:
            Layers of the blocks, and the layers of the logits, which stay whole in a pipeline.
        """
        return (), ()

    def with_mesh(self, *, pipeline: int, tensor: int) -> "Recipe":
        """This recipe with each copy of the model on pipeline x tensor workers.

        Raises:
            UsageError: if its model can't be divided that way.
        """
        raise UsageError(
            f"Recipe `{self.name}` has no blocks that tensor parallelism divides; `text` has."
        )

    @abstractmethod
    def build(self, comm: Communicator) -> Task:
        """Makes the task: model, data, loss and optimizer; it is called after seeding by `seed`."""

    def task(self, comm: Communicator) -> Task:
        """The task for `fit`, with initial weights seeded by `seed`.

        Raises:
            UsageError: as `check` and `check_workers` do.
        """
        self.check_workers(comm.size)
        self.check()
        torch.manual_seed(self.seed)
        task = self.build(comm)
        if self.train_share < 1 and not isinstance(task.train_set, Subset):
            raise UsageError(
                f"`train_share` (={self.train_share}): the recipe {self.name} builds its task of"
                " all samples; let its `build` return `self.make_task(...)`."
            )
        if self.optimizer == "rmsprop_warmup":  # its transition is defined in steps
            task = replace(task, optimizer=self._rmsprop_warmup(task))
        if self.last_statistics:
            allstep.nn.keep_last_statistics(task.model)
        return task

    def make_task(
        self,
        model: nn.Module,
        train_set: Dataset[Any],
        test_set: Dataset[Any],
        objective: Objective,
        later_stages: Sequence[allstep.Stage] = (),
        collate_fn: Callable[[list[Any]], Any] | None = None,
        kept: Mapping[str, str | int] | None = None,
    ) -> Task:
        """The task with the recipe's optimizer and schedule, on `train_share` of the samples.

        `train_set` must have a length; `kept` is `allstep.Task`'s.
        """
        train_set = self._share_of(train_set)
        later_stages = [
            replace(stage, train_set=self._share_of(stage.train_set)) for stage in later_stages
        ]
        assert isinstance(train_set, Sized)
        seconds = [stage.train_set for stage in later_stages]
        num_second = len(seconds[0]) if seconds and isinstance(seconds[0], Sized) else None
        return Task(
            model=model,
            train_set=train_set,
            test_set=test_set,
            loss=objective.loss,
            metrics=objective.metrics,
            optimizer=self.make_optimizer,
            schedule=self.make_schedule(len(train_set), num_second),
            collate_fn=collate_fn,
            later_stages=later_stages,
            kept=kept or {},
        )

    def _share_of(self, train_set: Dataset[Any]) -> Dataset[Any]:
        return allstep.data.subset(train_set, self.train_share, seed=self.seed)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of the model's parameters; biases and normalisation have no decay.

        It doesn't check gradients for infinities and NaN: the training step does, by the option
        `nonfinite`.
        """
        return self.settings.make_optimizer(model, nonfinite="propagate")

    def make_schedule(
        self, num_train_samples: int, num_second_samples: int | None = None
    ) -> Callable[[int], float]:
        """A function: step -> multiplier of the learning rate, over the whole run.

        Args:
            num_train_samples: samples of an epoch.
            num_second_samples: samples of an epoch of the second stage, if there is one.

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
        """Optimizer steps per epoch, each of `global_batch` samples; None for the recipe's own.

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
