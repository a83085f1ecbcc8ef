"""Experts along the axis of data whose layers tensor parallelism divides along another one."""

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.comm import Mesh, divided_modules, shards_of
from allstep.nn import MixtureOfExperts, tensor_parallel
from tests.helpers.divided import whole_state
from tests.helpers.processes import run_processes

State = dict[str, Tensor]
EXACT = allstep.Synchronous(compression="exact")


def make_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Dropout(0.2)).double()


class Routed(nn.Module):
    """A divided dense part, and experts with room for some of a micro-batch's tokens."""

    def __init__(self, data: Communicator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.hidden, self.output = nn.Linear(6, 8), nn.Linear(8, 6)
        self.mixture = MixtureOfExperts(
            make_expert, data, 6, num_experts=4, top_k=2, capacity_factor=1.25
        )
        self.dropout = nn.Dropout(0.3)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.dropout(self.output(self.hidden(self.norm(x)).tanh()))
        y, balance_loss = self.mixture(x)
        return x + y, balance_loss


def divide(model: Routed, mesh: Mesh[Communicator]) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    names = [f"mixture.experts.{number}" for number in model.mixture.experts]
    layers = {"hidden": ColwiseParallel(), "output": RowwiseParallel()}
    for name in names:
        layers |= {f"{name}.0": ColwiseParallel(), f"{name}.2": RowwiseParallel()}
    tensor_parallel(model, mesh, layers)


def leave(model: Routed, mesh: Mesh[Communicator]) -> None:
    """FSDP2 shards nothing."""


def average_experts(model: nn.Module) -> None:
    """Gradients as the mean over the axis of data, of what one worker along it has."""
    for modules in divided_modules(model).values():
        for p in modules.parameters():
            p.register_hook(lambda gradient, size=modules.comm.size: gradient / size)


def overflow(model: nn.Module) -> None:
    """The gradient of one expert's shard, and of no other."""
    shard = shards_of(model).get("mixture.experts.3.0.weight")
    p = dict(model.named_parameters()).get("mixture.experts.3.0.weight")
    if p is not None and p.grad is not None and (shard is None or shard.comm.rank == 0):
        p.grad[0, 0] = math.inf


def train(
    comm: Communicator,
    num_tensor: int,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    policy: allstep.Synchronous | None = None,
    *,
    shard: Callable[[Routed, Mesh[Communicator]], None] = leave,
    num: int = 46,
    weighs: bool = False,
    is_scaled: bool = False,
    num_passes: int = 1,
    clip_norm: float | None = 0.1,
    spoil: Callable[[nn.Module], None] = lambda model: None,
    run_dir: Path | None = None,
    num_epochs: int = 7,
) -> State:
    """Three steps an epoch of 5, 5 and 2 micro-batches, or with 42 samples 1, clipped by norm."""
    mesh = comm.mesh(data=comm.size // num_tensor, tensor=num_tensor)
    torch.manual_seed(0)
    model, data = Routed(mesh["data"]), mesh["data"]
    if num_tensor > 1:
        divide(model, mesh)
    if dist.is_initialized():
        shard(model, mesh)
    exchange = allstep.attach(model, data, policy)
    spoil(model)
    optimizer = kind(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
    torch.manual_seed(1)
    given = TensorDataset(*(torch.randn(num, 3, 6, dtype=torch.float64) for _ in range(2)))
    loader = allstep.data.loader(given, data, global_batch=20, micro_batch=4, seed=3)
    state: dict[str, Any] = {"optimizer": optimizer}
    with loader, allstep.AutoCheckpoint(run_dir, loader, exchange, state=state) as checkpoint:
        for _ in checkpoint.epochs(num_epochs):
            for batch in allstep.steps(
                loader, exchange, checkpoint=checkpoint, replay=num_passes > 1
            ):
                for _ in range(num_passes):
                    optimizer.zero_grad()
                    for x, target in batch:
                        y, balance_loss = model(x)
                        error = (y - target).square().mean((1, 2))
                        if weighs:
                            batch.backward(error.sum() + len(x) * balance_loss, weight=len(x))
                        else:
                            batch.backward(scaler.scale(error.mean() + 0.1 * balance_loss))
                if is_scaled:
                    if batch.step == 2:
                        overflow(model)
                    exchange.unscale_(scaler, optimizer)
                if clip_norm is not None:
                    exchange.clip_grad_norm_(clip_norm)
                scaler.step(optimizer)
                scaler.update()
    exchange.detach()
    assert not is_scaled or scaler.get_scale() == 512
    return whole_state(model)


shortly = partial(train, num_epochs=3)
by_sgd = partial(shortly, kind=torch.optim.SGD)
VARIANTS: dict[str, Callable[..., State]] = {
    "adamw": train,
    "short": partial(shortly, num=42),  # an epoch's last global batch leaves copies without any
    "lamb, weights": partial(shortly, kind=allstep.optim.LAMB, weighs=True),
    "scaled": partial(shortly, is_scaled=True),
    "two passes": partial(shortly, num_passes=2),
    "plain": partial(shortly, policy=allstep.Synchronous(plain=True)),
    "exact": partial(shortly, policy=EXACT, num=42),
}
CONTROLS: dict[str, Callable[..., State]] = {
    "means of experts": partial(by_sgd, spoil=average_experts),
    "not clipped": partial(by_sgd, clip_norm=None),
}


def variants(comm: Communicator, num_tensor: int) -> dict[str, State]:
    return {name: run(comm, num_tensor) for name, run in (VARIANTS | CONTROLS).items()}


def difference(found: State, expected: State) -> float:
    return max(float((x - expected[name]).abs().max()) for name, x in found.items())


@pytest.mark.process
@pytest.mark.parametrize(
    ("size", "num_tensor"),
    [
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(8, 2, marks=pytest.mark.slow),
    ],
)
def test_experts_of_divided_layers_are_the_same_model(size: int, num_tensor: int) -> None:
    """Four copies of five micro-batches: some have one, two or none, and one expert each."""
    alone = Communicator.single_process()
    expected = {name: run(alone, 1) for name, run in VARIANTS.items()}
    of_sgd = by_sgd(alone, 1)
    for found in run_processes(size, variants, num_tensor, timeout_s=400):
        for name, state in expected.items():
            assert difference(found[name], state) < 1e-10, name
        for name in CONTROLS:
            if size > num_tensor or name == "not clipped":
                assert difference(found[name], of_sgd) > 1e-6, name


def kept(comm: Communicator, num_tensor: int, run_dir: Path, num_epochs: int) -> State:
    return train(comm, num_tensor, policy=EXACT, run_dir=run_dir, num_epochs=num_epochs)


@pytest.mark.process
@pytest.mark.slow
def test_experts_of_divided_layers_go_on_on_other_meshes(tmp_path: Path) -> None:
    """From a checkpoint of 4 x 2; where layers are cut in as many parts, with the same bits."""
    alone = Communicator.single_process()
    expected = kept(alone, 1, tmp_path / "straight", 4)
    bits = run_processes(8, kept, 2, tmp_path / "straight-8", 4, timeout_s=200)
    run_processes(8, kept, 2, tmp_path / "run", 2, timeout_s=200)
    for size, num_tensor in ((4, 2), (4, 1), (1, 1)):
        folder = tmp_path / f"{size}-{num_tensor}"
        shutil.copytree(tmp_path / "run", folder)
        if size == 1:
            found = [kept(alone, 1, folder, 4)]
        else:
            found = run_processes(size, kept, num_tensor, folder, 4, timeout_s=200)
        for state in found:
            assert difference(state, expected) < 1e-10
        if num_tensor == 2:
            whole = {name: x for state in bits for name, x in state.items()}
            assert all(torch.equal(x, whole[n]) for state in found for n, x in state.items())
