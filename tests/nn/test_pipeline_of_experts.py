"""Stages of a pipeline with experts that lie along the axis of data, against one process."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, UsageError
from allstep.comm import Mesh
from allstep.nn import MixtureOfExperts, Pipeline, tensor_parallel
from tests.helpers.processes import run_processes
from tests.nn.test_pipeline import (
    Block,
    Head,
    Maker,
    Trained,
    assert_other,
    assert_same,
    inputs_of,
    keep,
    mean_error,
    plainly,
    train,
)
from tests.nn.test_pipeline_of_shards import Wide
from tests.nn.test_tensor_parallel import whole_state


def make_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 6)).double()


class Routed(nn.Module):
    """Experts with room for some of a micro-batch's tokens only, and a use of the balance loss."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.mixture = MixtureOfExperts(
            make_expert, comm, 6, num_experts=4, top_k=2, capacity_factor=1.25
        )
        self.after = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.3)
        self.double()

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        y, balance_loss = self.mixture(self.before(x))
        return x + self.dropout(self.after(y)).tanh() * balance_loss, counts


def makers(comm: Communicator) -> tuple[Maker, ...]:
    """With two workers along the pipeline the first one has no experts."""
    return Wide, Block, partial(Routed, comm), Head


def stage(make: Maker, mesh: Mesh[Communicator]) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    made = make()
    if isinstance(made, Wide) and "tensor" in mesh.shape:
        tensor_parallel(made, mesh, {"hidden": ColwiseParallel(), "output": RowwiseParallel()})
    return made


def make(comm: Communicator, schedule: str = "1f1b", **axes: int) -> tuple[Pipeline, Communicator]:
    mesh = comm.mesh(**axes)
    torch.manual_seed(0)
    model = Pipeline(
        [partial(stage, each, mesh) for each in makers(mesh["data"])],
        mesh,
        loss=mean_error,
        inputs=inputs_of,
        schedule=schedule,
    )
    return model, mesh["data"]


def trained(comm: Communicator, schedule: str = "1f1b", num: int = 46, **axes: int) -> Trained:
    model, data = make(comm, schedule, **axes)
    found = train(model, data, lambda batch: batch.run(model), num)
    return found._replace(state=whole_state(model))


def test_x() -> None:
    alone = Communicator.single_process()
    expected = plainly(stages=makers(alone))
    for found in run_processes(4, partial(trained, data=2, pipeline=2)):
        assert_same(found, expected)
