"""The task that a recipe passes to the loop: a model, its data in stages, loss and optimizer."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from allstep.data import GlobalBatchSampler
from allstep.errors import UsageError
from allstep.train.options import TrainOptions

Metrics = Mapping[str, tuple[float | Tensor, float | Tensor]]
"""Name -> (sum, count) over a micro-batch's samples; both are added up over the test set."""

Loss = Tensor | tuple[Tensor, float | Tensor]
"""The mean over a micro-batch's samples; or a sum and its weight, as the number of tokens."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """From an epoch on: other samples in other batches, as when sequences grow during a run.

    Steps and epochs continue to be counted; the task's schedule accounts for when a stage begins.

    Args:
        first_epoch: its first epoch, counted from 0.
        train_set: map-style data set of samples.
        test_set: map-style data set, for the evaluations during the stage.
        global_batch: samples of one optimizer step, over all workers together.
        micro_batch: samples that go through the model at once.
    """

    first_epoch: int
    train_set: Dataset[Any]
    test_set: Dataset[Any]
    global_batch: int
    micro_batch: int


@dataclass(frozen=True)
class Task:
    """A model, its data, its loss and how it is optimized.

    The loop moves model and data to the worker's device and sets every random state, so
    that the functions here need not know about workers.

    Args:
        model: the module to train. An `allstep.nn.Pipeline` on several workers uses its own loss
            and weight, which must equal what `loss` computes from its output.
        train_set: map-style or iterable data set of samples.
        test_set: map-style data set; each of its samples is counted exactly once.
        loss: `(model, micro_batch) -> scalar`, the mean over the micro-batch's samples; or
            `-> (scalar, weight)`, a sum over its tokens, frames or boxes and their number: each
            of them then counts the same in a global batch.
        metrics: `(model, micro_batch) -> {name: (sum, count)}`, for the evaluation.
        optimizer: `(model) -> Optimizer`, made after the model is on its device.
        schedule: `step -> multiplier` of every group's learning rate.
        collate_fn: samples -> micro-batch; torch's default when None.
        later_stages: the stages after `train_set` with the options' batches, in order.
        kept: name -> value that must not change between a run and its resumption or evaluation,
            beside the number of samples; for example a digest of the label names.
    """

    model: nn.Module
    train_set: Dataset[Any]
    test_set: Dataset[Any]
    loss: Callable[[nn.Module, Any], Loss]
    metrics: Callable[[nn.Module, Any], Metrics]
    optimizer: Callable[[nn.Module], Optimizer]
    schedule: Callable[[int], float] = lambda step: 1.0
    collate_fn: Callable[[list[Any]], Any] | None = None
    later_stages: Sequence[Stage] = ()
    kept: Mapping[str, str | int] = field(default_factory=dict)

    def mean_loss(self, model: nn.Module, micro_batch: Any) -> Tensor:
        """The mean over the micro-batch's samples, or over its tokens, frames or boxes."""
        loss = self.loss(model, micro_batch)
        return loss if isinstance(loss, Tensor) else loss[0] / loss[1]


def all_stages(task: Task, options: TrainOptions) -> list[Stage]:
    """The task's first stage, with the options' batches, and its later ones.

    Raises:
        UsageError: if they don't follow each other within the run's epochs, or if there are several
            and one is a stream.
    """
    first = Stage(
        first_epoch=0,
        train_set=task.train_set,
        test_set=task.test_set,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
    )
    stages = [first, *task.later_stages]
    begins = [stage.first_epoch for stage in stages]
    if sorted(set(begins)) != begins or begins[-1] >= options.epochs:
        raise UsageError(
            f"`later_stages` must begin at increasing epochs from 1 to {options.epochs - 1}, before"
            f" the run's `epochs` (={options.epochs}) are over; they begin at {begins[1:]}."
        )
    if len(stages) > 1:
        for stage in stages:
            num_samples_of(stage)
    return stages


def num_samples_of(stage: Stage) -> int:
    """Samples in one epoch of a stage.

    Raises:
        UsageError: if it is a stream, whose length is unknown.
    """
    if not isinstance(stage.train_set, Sized):
        raise UsageError(
            f"`train_set` (a {type(stage.train_set).__name__}) of a stage has no length; a run in"
            " stages needs map-style data sets."
        )
    return len(stage.train_set)


def num_total_steps(stages: Sequence[Stage], options: TrainOptions) -> int:
    """Optimizer steps of the whole run, over all stages."""
    ends = [stage.first_epoch for stage in stages[1:]] + [options.epochs]
    num_steps = 0
    for stage, end in zip(stages, ends, strict=True):
        sampler = GlobalBatchSampler(
            num_samples_of(stage),
            global_batch=stage.global_batch,
            micro_batch=stage.micro_batch,
            drop_last=options.drop_last,
        )
        num_steps += (end - stage.first_epoch) * len(sampler)
    return num_steps
