"""Checkpoints of torch's distributed tensors: whole, without ever being so on a worker."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.train import Checkpoints, read_checkpoint
from tests.helpers.processes import run_processes

WHOLE = torch.arange(5 * 6.0).view(5, 6)
PLACEMENTS = {
    "uneven": [Shard(0), Replicate()],
    "both": [Shard(0), Shard(1)],
    "one dim twice": [Shard(0), Shard(0)],
    "replicated": [Replicate(), Replicate()],
}


def whole_tensor(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def save(comm: Communicator, folder: Path) -> dict[str, Any]:
    """A net under FSDP2 and tensor parallelism after a step of Adam, and tensors of all kinds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(WHOLE).square().mean().backward()
    optimizer.step()
    tensors = {name: distribute_tensor(WHOLE, mesh, p) for name, p in PLACEMENTS.items()}
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tensors": tensors,
        "plain": torch.ones(2),
    }
    Checkpoints(folder, comm, message_bytes=64).save(1, state)
    moments = optimizer.state_dict()["state"][0]["exp_avg"]
    return {
        "model": {name: whole_tensor(x).detach() for name, x in model.state_dict().items()},
        "moments": whole_tensor(moments),
    }


@pytest.mark.process
def test_fsdp2_with_tensor_parallelism_and_tensors_of_all_placements(tmp_path: Path) -> None:
    expected, *_ = run_processes(4, save, tmp_path)
    found = read_checkpoint(tmp_path / "step-00000001")
    assert found["model"].keys() == expected["model"].keys()
    for name, x in expected["model"].items():
        assert torch.equal(found["model"][name], x), name
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], expected["moments"])
    assert torch.equal(found["plain"], torch.ones(2))
    for name in PLACEMENTS:
        assert torch.equal(found["tensors"][name], WHOLE), name


def refused(comm: Communicator, folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (comm.size,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    half = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    said = []
    for x, of in ((partial, comm), (half, Communicator.single_process())):
        with pytest.raises(UsageError) as error:
            Checkpoints(folder, of).save(1, {"x": x})
        said.append(str(error.value))
    return said


@pytest.mark.process
def test_dtensors_that_are_no_parts_of_all_workers(tmp_path: Path) -> None:
    for partial, half in run_processes(2, refused, tmp_path):
        assert "a DTensor at `x` that is a sum over workers not made yet" in partial
        assert "a DTensor at `x` on a mesh of 2 workers, and the checkpoint is of 1" in half
