"""Sharded parameters (FSDP2, tensor parallel, both) get the update of whole ones."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import Optimizer

from allstep import Communicator
from allstep.optim import NonfiniteGradientError, TrustRatio
from tests.helpers.processes import run_processes
from tests.optim.table import OPTIMIZERS

pytestmark = pytest.mark.process

NUM_STEPS = 5


def make_model() -> nn.Sequential:
    """The last layer has three rows, which two workers share unevenly, and four with one idle."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(inputs(step)).square().sum()
    return loss


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Collectives:
    """Counts the reductions of optimizer steps."""

    def __init__(self) -> None:
        self.count = 0
        self._all_reduce = dist.all_reduce

    def __enter__(self) -> "Collectives":
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self._all_reduce(*args, **kwargs)

        dist.all_reduce = counted
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_reduce = self._all_reduce


def steps(model: nn.Module, optimizer: Optimizer, num_steps: int = NUM_STEPS) -> int:
    """Trains; returns the number of collectives of the optimizer."""
    count = 0
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with Collectives() as collectives:
            optimizer.step()
        count += collectives.count
    return count


def sharded_model(kind: str, size: int) -> nn.Module:
    model = make_model()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if kind == "tensor parallel":
        return tensor_parallel(model, init_device_mesh("cpu", (size,)))
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    if kind == "fsdp and tensor parallel":
        return fully_shard(tensor_parallel(model, mesh["inner"]), mesh=mesh["outer"])
    assert kind == "hybrid"
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def compare(comm: Communicator, kind: str, names: list[str]) -> dict[str, tuple[float, float]]:
    """By optimizer: difference to the unsharded run, collectives a step."""
    found = {}
    for name in names:
        alone, model = make_model(), sharded_model(kind, comm.size)
        oracle = OPTIMIZERS[name](list(alone.named_parameters()), lr=0.05, weight_decay=0.1)
        optimizer = OPTIMIZERS[name](list(model.named_parameters()), lr=0.05, weight_decay=0.1)
        steps(alone, oracle)
        count = steps(model, optimizer)
        differences = [
            float((whole(p.detach()) - q.detach()).abs().max())
            for p, q in zip(model.parameters(), alone.parameters(), strict=True)
        ]
        if "warmup" not in name:
            ratios, expected = optimizer.trust_ratios(), oracle.trust_ratios()
            assert ratios == pytest.approx(expected, rel=1e-10)
        found[name] = (max(differences), count / NUM_STEPS)
    return found


FASTEST = [name for name in OPTIMIZERS if "True" in name or " " not in name]


@pytest.mark.parametrize(
    ("size", "names"), [(2, list(OPTIMIZERS)), pytest.param(4, FASTEST, marks=pytest.mark.slow)]
)
def test_fully_shard_gives_the_whole_update(size: int, names: list[str]) -> None:
    for found in run_processes(size, compare, "fsdp", names):
        assert list(found) == names
        for name, (difference, collectives) in found.items():
            assert difference < 1e-10, name
            assert collectives == 1, name


@pytest.mark.parametrize(
    ("kind", "dimensions"),
    [("tensor parallel", 1), ("fsdp and tensor parallel", 2), ("hybrid", 1)],
)
def test_other_meshes_give_the_whole_update(kind: str, dimensions: int) -> None:
    """One collective for each dimension of the mesh that parameters are cut along."""
    names = ["lamb {'fused': True}", "lars {'fused': True}", "layer_wise"]
    for found in run_processes(4, compare, kind, names):
        for name, (difference, collectives) in found.items():
            assert difference < 1e-10, name
            assert collectives == dimensions, name


def norms_of_parts(comm: Communicator) -> float:
    """The naive variant: every worker takes the norms of its own part."""
    model, alone = sharded_model("fsdp", comm.size), make_model()
    parts = [nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]
    make = OPTIMIZERS["lamb {'fused': True}"]
    naive, oracle = make(parts), make(alone.parameters())
    for step in range(NUM_STEPS):
        model.zero_grad()
        loss_of(model, step).backward()
        for part, parameter in zip(parts, model.parameters(), strict=True):
            part.grad = parameter.grad.to_local()
        naive.step()
        for part, parameter in zip(parts, model.parameters(), strict=True):
            parameter.to_local().data.copy_(part.data)
    steps(alone, oracle)
    return max(
        float((whole(p.detach()) - q.detach()).abs().max())
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )


def test_control_norms_of_shards_differ() -> None:
    assert min(run_processes(2, norms_of_parts)) > 1e-4


def poison(model: nn.Module, rank: int) -> None:
    """One worker's part of one gradient goes bad."""
    gradient = model[0].weight.grad
    if rank == 1:
        gradient.to_local()[0, 0] = float("nan")


def bad_gradients(comm: Communicator) -> list[tuple[str, list[int], bool]]:
    """By policy: what was raised or counted on each worker, and whether anything moved."""
    found = []
    adapting = [
        (name, {"trust_ratio": TrustRatio(norm=norm)})
        for name in ("lamb {'fused': True}", "lars {'fused': True}")
        for norm in ("l1", "l2", "linf")
    ]
    for name, options in [*adapting, ("warmup {'fused': True}", {})]:
        for policy in ("raise", "skip"):
            model = sharded_model("fsdp", comm.size)
            named = list(model.named_parameters())
            optimizer = OPTIMIZERS[name](named, nonfinite=policy, **options)
            loss_of(model, 0).backward()
            poison(model, comm.rank)
            before = [p.to_local().detach().clone() for p in model.parameters()]
            said, counts = "", []
            with Collectives() as collectives:
                try:
                    optimizer.step()
                except NonfiniteGradientError as error:
                    said = str(error)
            counts = [optimizer.num_skipped, collectives.count]
            same = all(
                torch.equal(p.to_local(), q)
                for p, q in zip(model.parameters(), before, strict=True)
            )
            found.append((said, counts, same))
    return found


def test_nonfinite_shard_stops_or_skips_all_workers() -> None:
    for found in run_processes(2, bad_gradients):
        for index, (said, (num_skipped, collectives), same) in enumerate(found):
            assert same
            assert collectives == 1
            if index % 2 == 0:
                assert "gradient of 0.weight, or" in said and num_skipped == 0
            else:
                assert said == "" and num_skipped == 1


def other_placements(comm: Communicator) -> bool:
    """A gradient that lies otherwise than its parameter is brought in line."""
    mesh = init_device_mesh("cpu", (comm.size,))
    weight = torch.arange(12.0, dtype=torch.float64).view(4, 3) + 1
    gradient = torch.arange(12.0, dtype=torch.float64).view(4, 3) - 5
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(gradient, mesh, [Replicate()])
    plain = nn.Parameter(weight.clone())
    plain.grad = gradient
    for optimizer in (OPTIMIZERS["layer_wise"]([parameter]), OPTIMIZERS["layer_wise"]([plain])):
        optimizer.step()
    return torch.allclose(parameter.full_tensor(), plain, rtol=1e-12, atol=0)


def test_gradients_with_other_placements() -> None:
    assert all(run_processes(2, other_placements))


def masters(comm: Communicator) -> bool:
    """Sharded bfloat16 with a master copy; its state survives a checkpoint bit for bit."""
    model = make_model().bfloat16()
    fully_shard(model, mesh=init_device_mesh("cpu", (comm.size,)))
    make = OPTIMIZERS["lamb {'fused': True}"]
    optimizer = make(model.parameters())
    states = []
    for step in range(4):
        if step == 2:
            kept = copy.deepcopy(optimizer.state_dict())
            weights = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(inputs(step).bfloat16()).square().sum().backward()
        optimizer.step()
    states.append([p.to_local().clone() for p in model.parameters()])
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
    optimizer = make(model.parameters())
    optimizer.load_state_dict(kept)
    for step in range(2, 4):
        optimizer.zero_grad()
        model(inputs(step).bfloat16()).square().sum().backward()
        optimizer.step()
    states.append([p.to_local().clone() for p in model.parameters()])
    assert isinstance(optimizer.state[next(model.parameters())]["master"], DTensor)
    return all(torch.equal(x, y) for x, y in zip(*states, strict=True))


def test_sharded_masters_resume_bit_for_bit() -> None:
    assert all(run_processes(2, masters))
