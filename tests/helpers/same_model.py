"""A small run in which everything that could depend on the workers is at work.

Batch norm, dropout, random augmentation, several micro-batches a step, a short last one.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import allstep
from allstep import Communicator, Task, TrainOptions

GLOBAL_BATCH = 96
MICRO_BATCH = 8
NUM_SAMPLES = 3 * GLOBAL_BATCH + 44  # the fourth step of an epoch: 5 micro-batches and a short one
NUM_EPOCHS = 5  # 20 steps
OPTIONS = TrainOptions(
    epochs=2,
    global_batch=GLOBAL_BATCH,
    micro_batch=MICRO_BATCH,
    seed=11,
    precision="float64",
    log_every_steps=1,
)


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Random images, if asked for with an augmentation that draws from all three random states."""

    def __init__(self, num_samples: int = NUM_SAMPLES, *, augment: bool = True) -> None:
        self._augment = augment
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(num_samples, 2, 6, 6, generator=generator, dtype=torch.float64)
        self._y = torch.randint(0, 3, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self._x[index]
        if not self._augment:
            return x, self._y[index]
        if random.random() < 0.5:
            x = x.flip(-1)
        return x * np.random.uniform(0.5, 1.5) + 0.1 * torch.randn_like(x), self._y[index]


def _make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            # No bias: its gradient is zero but for rounding, which Adam would blow up.
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(64, 3),
        ).double()


_MODEL = _make_model()  # made once: ranks that are threads share one random state


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    x, y = data
    return nn.functional.cross_entropy(model(x), y)


def metrics_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, tuple[Any, Any]]:
    x, y = data
    return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}


def make_task(optimizer: str, *, augment: bool = True) -> Task:
    return Task(
        model=copy.deepcopy(_MODEL),
        train_set=Images(augment=augment),
        test_set=Images(50, augment=augment),
        loss=loss_of,
        metrics=metrics_of,
        optimizer=OPTIMIZERS[optimizer],
        schedule=lambda step: 1 / (1 + 0.1 * step),
    )


def train_with_steps(
    comm: Communicator, optimizer: str, *, augment: bool = True, loader_workers: int = 0
) -> dict[str, Tensor]:
    """A user's own loop; returns the trained model's state."""
    task = make_task(optimizer, augment=augment)
    model, update = task.model.to(comm.device), task.optimizer(task.model)
    base_rate = update.param_groups[0]["lr"]
    exchange = allstep.attach(model, comm)
    with allstep.data.loader(
        task.train_set,
        comm,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        seed=11,
        num_workers=loader_workers,
    ) as loader:
        while loader.epoch < NUM_EPOCHS:
            for batch in allstep.steps(loader, exchange):
                update.param_groups[0]["lr"] = base_rate * task.schedule(batch.step)
                for data in batch:
                    batch.backward(loss_of(model, data))
                update.step()
                update.zero_grad()
    exchange.detach()
    return model.state_dict()
