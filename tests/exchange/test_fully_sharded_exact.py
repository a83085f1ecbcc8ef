"""Exact sums of a model that FSDP2 has sharded: the same bits on any number of workers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, Synchronous
from allstep.exchange.exact_sums import ExactSums
from tests.exchange.nets import differs
from tests.helpers.compare import differing_names
from tests.helpers.divided import run_epochs, whole_state
from tests.helpers.messages import check_messages, refused
from tests.helpers.processes import run_processes
from tests.helpers.versions import needs_torch_2_13

pytestmark = pytest.mark.process

EXACT = Synchronous(compression="exact")


class Net(nn.Module):
    """Rows with a unit each, and others; a branch that some samples take; rows unevenly sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(70, 9), nn.Dropout(0.2), nn.BatchNorm1d(9), nn.Tanh())
        self.branches = nn.ModuleList(nn.Linear(9, 65) for _ in range(3))
        self.last = nn.Linear(65, 5)

    def forward(self, x: Tensor) -> Tensor:
        number = min(int(10 * x[0, 0].abs()), 1)  # nobody takes the third
        return self.last(torch.tanh(self.branches[number](self.first(x))))


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert not differing_names(found, expected)


def make_model() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net().float()


def shard(model: Net, comm: Communicator, num_copies: int = 1) -> Net:
    if num_copies > 1:
        mesh = comm.mesh(replicate=num_copies, shard=comm.size // num_copies)
    else:
        mesh = comm.mesh(data=comm.size)
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh.device_mesh())
    fully_shard(model, mesh=mesh.device_mesh())
    return model


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 70, generator=generator)
    x[21] *= 1e7  # a gradient that leaves the grid
    return TensorDataset(x, torch.randint(0, 5, (48,), generator=generator))


def train(
    comm: Communicator,
    *,
    is_sharded: bool = True,
    policy: Synchronous = EXACT,
    num_copies: int = 1,
    clips: bool = False,
    optimizer: Any = torch.optim.AdamW,
    run_dir: Path | None = None,
    num_epochs: int = 2,
) -> dict[str, Tensor]:
    """Parameters, statistics, losses; micro-batches 5 a step, and one that was there before."""
    torch.set_num_threads(1)
    model = make_model()
    if is_sharded:
        shard(model, comm, num_copies)
    exchange = allstep.attach(model, comm, policy)
    update = optimizer(model.parameters(), lr=0.01)
    loader = allstep.data.loader(samples(), comm, global_batch=15, micro_batch=3, seed=5)
    found: dict[str, Tensor] = {}

    def run_epoch(checkpoint: allstep.AutoCheckpoint | None) -> None:
        for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
            for x, y in batch:
                batch.backward(F.cross_entropy(model(x), y))
            if clips:
                norm = float(exchange.clip_grad_norm_(0.5))
                found[f"norm {batch.step}"] = torch.tensor(norm, dtype=torch.float64)
            update.step()
            if batch.step % 4 != 1:  # else it counts once in the next one
                update.zero_grad()
            found[f"loss {batch.step}"] = torch.tensor(batch.global_loss(), dtype=torch.float64)

    run_epochs(run_epoch, num_epochs, run_dir, loader, exchange, update)
    found["completed"] = torch.tensor(exchange.stats().num_completed)
    return found | whole_state(model)


def leave_out_what_is_apart(comm: Communicator) -> dict[str, Tensor]:
    """The control: FSDP2 adds up what is on the grid, and that is all."""
    ExactSums.settle = lambda self, off_grid: off_grid.clear()  # type: ignore[method-assign]
    return train(comm)


def train_all(comm: Communicator) -> list[dict[str, Tensor]]:
    fp32 = train(comm, policy=Synchronous(), is_sharded=comm.size > 1)
    of_layers = [
        train(comm, optimizer=partial(kind, weight_decay=0.1))
        for kind in (allstep.optim.LAMB, allstep.optim.LARS)
    ]
    return [train(comm), train(comm, clips=True), fp32, leave_out_what_is_apart(comm), *of_layers]


@pytest.fixture(scope="module")
def one() -> list[dict[str, Tensor]]:
    """Of one worker that shards its model, too."""
    [found] = run_processes(1, train_all)
    return found


def test_one_worker_that_shards_has_the_bits_of_one_that_does_not(
    one: list[dict[str, Tensor]],
) -> None:
    [whole] = run_processes(1, partial(train, is_sharded=False))
    assert_same_bits(one[0], whole)
    assert whole["completed"] > 1


@needs_torch_2_13
@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 5))])
def test_shards_have_the_same_bits_on_any_number_of_workers(
    size: int, one: list[dict[str, Tensor]]
) -> None:
    exact, clipped, fp32, without, *of_layers = one
    assert differs(without, exact, by=1e-5)
    for found in run_processes(size, train_all):
        assert_same_bits(found[0], exact)
        assert_same_bits(found[1], clipped)
        assert any(not torch.equal(found[2][name], x) for name, x in fp32.items())
        assert differs(found[3], exact, by=1e-5)
        for each, expected in zip(found[4:], of_layers, strict=True):
            assert_same_bits(each, expected)


@pytest.mark.slow
def test_copies_of_shards_have_the_same_bits(one: list[dict[str, Tensor]]) -> None:
    for found in run_processes(4, partial(train, num_copies=2, clips=True)):
        assert_same_bits(found, one[1])


@pytest.mark.slow
def test_exact_shards_go_on_on_other_workers(tmp_path: Path) -> None:
    """On three, and on one that doesn't shard, from a checkpoint of two."""
    run = partial(train, run_dir=tmp_path / "undisturbed", num_epochs=3, is_sharded=False)
    [undisturbed] = run_processes(1, run)
    run_processes(2, partial(train, run_dir=tmp_path / "run", num_epochs=1))
    later = partial(train, run_dir=tmp_path / "run")
    for found in run_processes(3, partial(later, num_epochs=2)):
        assert len(found) < len(undisturbed)
    [found] = run_processes(1, partial(later, num_epochs=3, is_sharded=False))
    for result in (found, undisturbed):
        result.pop("completed")
    assert_same_bits(found, {name: undisturbed[name] for name in found})


# -- memory ------------------------------------------------------------------------------------


def most_kept_apart(comm: Communicator) -> int:
    """The most parameters whose whole gradients a worker keeps in a step that nobody has seen."""
    torch.set_num_threads(1)
    most = 0
    settle = ExactSums.settle

    def counting(self: ExactSums, off_grid: dict[str, Any]) -> None:
        nonlocal most
        most = max(most, len(off_grid))
        settle(self, off_grid)

    ExactSums.settle = counting  # type: ignore[method-assign]
    model = nn.Sequential(*(nn.Linear(4, 4).float() for _ in range(6)))
    for layer in model:
        fully_shard(layer, mesh=comm.mesh(data=comm.size).device_mesh())
    fully_shard(model, mesh=comm.mesh(data=comm.size).device_mesh())
    exchange = allstep.attach(model, comm, EXACT)
    loader = allstep.data.loader(
        TensorDataset(torch.ones(4, 4)), comm, global_batch=4, micro_batch=1
    )
    for batch in allstep.steps(loader, exchange):
        for (x,) in batch:
            batch.backward(model(x).square().mean())
    assert exchange.stats().num_completed == 1
    return most


def test_whole_gradients_are_kept_of_one_module_at_a_time() -> None:
    assert run_processes(2, most_kept_apart) == [2, 2]


# -- what is refused ---------------------------------------------------------------------------


def refusals(comm: Communicator) -> dict[str, str]:
    mesh = comm.mesh(data=comm.size).device_mesh()
    low = make_model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(low, mesh=mesh, mp_policy=policy)
    found = {}
    loader = allstep.data.loader(samples(), comm, global_batch=6, micro_batch=3)

    def step(model: nn.Module, optimizer: Any) -> None:
        exchange = allstep.attach(model, comm, EXACT)
        update = optimizer(model.parameters(), lr=0.1)
        for batch in allstep.steps(loader, exchange):
            for x, y in batch:
                batch.backward(F.cross_entropy(model(x).float(), y))
            update.step()

    fused = partial(torch.optim.AdamW, fused=True)
    found["fused"] = refused(lambda: step(shard(make_model(), comm), fused))
    found["low"] = refused(lambda: step(low, torch.optim.SGD))
    of_sums = partial(
        allstep.optim.LAMB, trust_ratio=allstep.optim.TrustRatio(norm="l1"), weight_decay=0.1
    )
    found["lamb"] = refused(lambda: step(shard(make_model(), comm), of_sums))
    return found


def test_what_exact_shards_refuse() -> None:
    words = {
        "fused": "The AdamW has `fused` (=True)",
        "low": "`first.0.weight` is gathered as torch.bfloat16",
        "lamb": "`trust_ratio.norm` (='l1') depends on where a parameter was cut",
    }
    for found in run_processes(2, refusals):
        check_messages(found, words)
