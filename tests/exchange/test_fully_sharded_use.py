"""Models under FSDP2 of which workers use different layers and parameters."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import Dataset, TensorDataset

import allstep
from allstep import Communicator
from allstep.data import MapLoader
from allstep.errors import DisagreementError
from allstep.exchange import Exchange
from allstep.exchange.fully_sharded_use import PartsInUse
from tests.exchange.nets import assert_same, differs
from tests.helpers.divided import whole_state
from tests.helpers.messages import check_messages
from tests.helpers.processes import Workers, run_processes
from tests.helpers.versions import needs_torch_2_13

pytestmark = pytest.mark.process

WIDTH, MICRO_BATCH = 4, 2


class Branches(nn.Module):
    """Its samples say which layers it uses: micro-batches take turns; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.branches[int(x[0, 0])](x)
        return self.head(hidden.tanh())


def samples(branches: list[int]) -> TensorDataset:
    """A micro-batch for each branch."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(branches) * MICRO_BATCH, WIDTH, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.tensor(branches).repeat_interleave(MICRO_BATCH)
    return TensorDataset(x)


def train(
    comm: Communicator, branches: list[int], *, is_sharded: bool, shards_layers: bool = False
) -> dict[str, Tensor]:
    """The model after global batches of 5 micro-batches; where the unused have a gradient."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Branches().double()
    if is_sharded:
        mesh = comm.mesh(data=comm.size).device_mesh()
        for layer in model.branches if shards_layers else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    exchange = allstep.attach(model, comm)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
    loader = allstep.data.loader(
        samples(branches),
        comm,
        global_batch=5 * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        shuffle=False,
    )
    for batch in allstep.steps(loader, exchange):
        for (x,) in batch:
            batch.backward(model(x).square().mean())
        assert model.unused.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


# Of two workers, which run the first two and the last three of five.
TURNS = "01100 00222 12000 2"
MIXED = "00111 11000"


def branches(turns: str) -> list[int]:
    return [int(turn) for turn in turns.replace(" ", "")]


def train_whole(comm: Communicator) -> list[dict[str, Tensor]]:
    return [train(comm, branches(turns), is_sharded=False) for turns in (TURNS, MIXED)]


def gradients_of_plain_loop(comm: Communicator) -> list[float]:
    """Of each branch, where each worker has one of its own in a loop without `steps`."""
    model = Branches()
    fully_shard(model, mesh=comm.mesh(data=comm.size).device_mesh())
    exchange = allstep.attach(model, comm)
    x = torch.full((1, WIDTH), float(comm.rank))
    model(x).sum().backward()
    exchange.detach()
    return [float(layer.bias.grad.full_tensor().abs().sum()) for layer in model.branches]


def train_sharded(comm: Communicator) -> list[dict[str, Tensor]]:
    of_branches = gradients_of_plain_loop(comm)
    assert all(of_branches[:2]) and of_branches[2] == 0
    found = train(comm, branches(TURNS), is_sharded=True)
    PartsInUse._send_zeros = lambda self, is_on: None  # type: ignore[method-assign]
    PartsInUse.end = lambda self, _: None  # type: ignore[method-assign]
    return [found, train(comm, branches(MIXED), is_sharded=True)]


@needs_torch_2_13
def test_parameters_that_some_workers_use_are_trained_as_by_one() -> None:
    """The control: without zeros FSDP2 adds the gradients of one branch to another's."""
    [(expected, expected_of_mixed)] = run_processes(1, train_whole)
    for found, mixed in run_processes(2, train_sharded):
        assert_same(found, expected)
        assert differs(mixed, expected_of_mixed, by=1e-3)


def refusals(comm: Communicator) -> dict[str, str]:
    found = {}

    def refused(name: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(DisagreementError) as error:
            train(comm, *arguments, is_sharded=True, **options)
        found[name] = str(error.value)

    refused("layers", branches(MIXED), shards_layers=True)
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        del FSDPModule.set_reduce_scatter_unused_params
    train(comm, branches("000000"), is_sharded=True)
    refused("torch before 2.13", branches(MIXED))
    return found


def test_layers_that_only_some_workers_call_are_refused() -> None:
    """Before an update; without the sums of zeros of torch 2.13 parameters are, too."""
    words = {
        "layers": "`call 1` is branches.0 on rank 0; branches.1 on rank 1",
        "torch before 2.13": "Parameters of such a module that only some workers use need torch",
    }
    for found in run_processes(2, refusals):
        check_messages(found, words)


def sharded(comm: Communicator) -> tuple[Branches, Exchange, MapLoader]:
    """A model that workers use different branches of, and four global batches."""
    model = Branches().double()
    fully_shard(model, mesh=comm.mesh(data=comm.size).device_mesh())
    data = samples(branches(TURNS))
    loader = allstep.data.loader(data, comm, global_batch=5 * MICRO_BATCH, micro_batch=MICRO_BATCH)
    return model, allstep.attach(model, comm), loader


def messages_of_steps(comm: Communicator) -> list[list[str]]:
    """What allstep sends in each step; a worker comes to it with a gradient that others lack."""
    model, exchange, loader = sharded(comm)
    kept = model.unused.bias
    if comm.rank == 0:
        kept.grad = torch.zeros_like(kept)
    all_reduce, all_gather, sent = comm.wire.all_reduce, comm.messages.all_gather, list[str]()

    def counted_all_reduce(*arguments: Any) -> Any:
        sent.append("all_reduce")
        return all_reduce(*arguments)

    def counted_all_gather(*arguments: Any, **options: Any) -> list[bytes]:
        sent.append("all_gather")
        return all_gather(*arguments, **options)

    comm.wire.all_reduce = counted_all_reduce  # type: ignore[method-assign]
    comm.messages.all_gather = counted_all_gather  # type: ignore[method-assign]
    found = []
    for batch in allstep.steps(loader, exchange):
        for (x,) in batch:
            batch.backward(model(x).square().mean())
        found.append(sent.copy())
        sent.clear()
        assert kept.grad is not None  # the other worker has its part
    return found


@needs_torch_2_13
def test_a_step_takes_two_messages_beside_those_of_fsdp2() -> None:
    """How many passes the workers make, sent before them, and one comparison of all else."""
    for _, *steps in run_processes(2, messages_of_steps):  # the first compares more
        assert len(steps) == 3
        assert all(sent == ["all_reduce", "all_gather"] for sent in steps)


def lose_a_worker_between_steps(is_behind_step: Path) -> None:
    with allstep.init(device="cpu", timeout_s=30.0) as comm:
        model, exchange, loader = sharded(comm)
        for batch in allstep.steps(loader, exchange):
            for (x,) in batch:
                batch.backward(model(x).square().mean())
            if batch.step == 1 and comm.rank == 0:
                is_behind_step.touch()
            elif batch.step == 1:
                while not is_behind_step.exists():  # what was sent might end with the connection
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)


@needs_torch_2_13
def test_worker_that_is_lost_between_two_steps_has_a_name(tmp_path: Path) -> None:
    """FSDP2's first message of a step would end with the backend's words."""
    with Workers(2, lose_a_worker_between_steps, (tmp_path / "is-behind-step",)) as workers:
        assert workers.join() == [1, -signal.SIGKILL]
        lost = workers.outcomes()[0].value
    assert re.search(r"PeerLostError: `all_reduce` on rank 0 of 2: rank 1 \(process \d+ on ", lost)


class NotedSamples(Dataset[Tensor]):
    """Samples that leave a file when they are read."""

    def __init__(self, path: Path) -> None:
        self.path, self._x = path, samples(branches(TURNS)).tensors[0]

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        self.path.touch()
        return (self._x[index],)


def come_late_to_a_step(comm: Communicator, folder: Path) -> int:
    """One worker comes to the second step only when the other has read its samples."""
    model, exchange, _ = sharded(comm)
    is_read = folder / str(comm.rank)
    data = NotedSamples(is_read)
    loader = allstep.data.loader(data, comm, global_batch=5 * MICRO_BATCH, micro_batch=MICRO_BATCH)
    for batch in allstep.steps(loader, exchange):
        for (x,) in batch:
            batch.backward(model(x).square().mean())
        if batch.step == 0:
            is_read.unlink()
            comm.barrier()
            while comm.rank == 1 and not (folder / "0").exists():
                time.sleep(0.01)
    return loader.step


@needs_torch_2_13
def test_samples_are_read_before_the_others_come_to_a_step(tmp_path: Path) -> None:
    assert run_processes(2, come_late_to_a_step, tmp_path) == [4, 4]
