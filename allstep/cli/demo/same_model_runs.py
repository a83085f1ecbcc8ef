"""The trainings of the same-model panel, as each worker runs them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from allstep.comm import Communicator
from allstep.recipes.digits import Digits
from allstep.train import fit, write_checkpoint

__all__ = ["NUM_STEPS", "train_as_usual", "train_the_same"]

# Twelve micro-batches, so that 1, 2, 3 and 4 workers all have equal work.
_RECIPE = Digits(
    width=16,
    epochs=4,
    global_batch=96,
    micro_batch=8,
    warmup_epochs=1.0,
    evaluate_every_epochs=4,
    checkpoint_every_steps=10,
)
NUM_STEPS = 4 * 15


def train_the_same(comm: Communicator, folder: str, compression: str, resume: bool) -> str:
    """The recipe `digits`, as `allstep train` runs it; returns the last checkpoint's folder."""
    recipe = replace(_RECIPE, compression=compression)
    report = fit(recipe.task(comm), recipe, comm, folder, resume=resume)
    return str(report.checkpoint)


def train_as_usual(comm: Communicator, folder: str) -> str:
    """The same model and batches in DistributedDataParallel, as its tutorials do it.

    Batch norm sees a worker's samples alone, and each worker draws its own dropout.
    """
    task = _RECIPE.task(comm)
    torch.manual_seed(comm.rank)
    sampler: DistributedSampler[Any] = DistributedSampler(
        task.train_set, comm.size, comm.rank, seed=_RECIPE.seed
    )
    batches = DataLoader(task.train_set, _RECIPE.global_batch // comm.size, sampler=sampler)
    model: nn.Module = task.model
    if comm.size > 1:
        model = DistributedDataParallel(model)
    optimizer = task.optimizer(task.model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, task.schedule)
    for epoch in range(_RECIPE.epochs):
        sampler.set_epoch(epoch)
        for batch in batches:
            optimizer.zero_grad()
            task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    path = Path(folder) / "last"
    if comm.rank == 0:
        write_checkpoint(path, {"model": task.model.state_dict()}, step=NUM_STEPS)
    return str(path)
