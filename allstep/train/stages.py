"""The stages of a run: which samples in which batches, from which epoch on."""

from collections.abc import Sequence, Sized

from allstep.data import GlobalBatchSampler
from allstep.errors import UsageError
from allstep.train.options import TrainOptions
from allstep.train.task import Stage, Task

__all__ = ["all_stages", "num_samples_of", "num_total_steps"]


def all_stages(task: Task, options: TrainOptions) -> list[Stage]:
    """The task's first stage, with the options' batches, and its later ones.

    Raises:
        UsageError: if they don't follow each other within the run's epochs, or if one of several
            is a stream.
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
    """Samples of one of its epochs.

    Raises:
        UsageError: if it is a stream, whose epochs have no known length.
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
