"""What a recipe hands to the loop: a model, its data and what to make of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

__all__ = ["Metrics", "Stage", "Task"]

Metrics = Mapping[str, tuple[float | Tensor, float | Tensor]]
"""Name -> (sum, count) over a micro-batch's samples; both are added up over the test set."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Other samples in other batches from an epoch on, as when sequences grow during a run.

    Steps and epochs are counted on; the task's schedule knows when the stage begins.

    Args:
        first_epoch: the epoch that it begins with, counted from 0.
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
    that the functions here need to know nothing of workers.

    Args:
        model: the module to train.
        train_set: map-style or iterable data set of samples.
        test_set: map-style data set; each of its samples is counted exactly once.
        loss: `(model, micro_batch) -> scalar`, the mean over the micro-batch's samples.
        metrics: `(model, micro_batch) -> {name: (sum, count)}`, for the evaluation.
        optimizer: `(model) -> Optimizer`, made after the model is on its device.
        schedule: `step -> multiplier` of every group's learning rate.
        collate_fn: samples -> micro-batch; torch's default when None.
        later_stages: what comes after `train_set` with the options' batches, in order.
    """

    model: nn.Module
    train_set: Dataset[Any]
    test_set: Dataset[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    metrics: Callable[[nn.Module, Any], Metrics]
    optimizer: Callable[[nn.Module], Optimizer]
    schedule: Callable[[int], float] = lambda step: 1.0
    collate_fn: Callable[[list[Any]], Any] | None = None
    later_stages: Sequence[Stage] = ()
