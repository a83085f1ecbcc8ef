"""Locally connected filters, of which each worker has its own, in updates that look at all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.nn import Conv2d, Grid, LocallyConnected2d
from allstep.nn.windows import full_tensor, local_shard
from tests.helpers.ranks import run_ranks
from tests.nn.grids import values

SIZE, NUM_SAMPLES, NUM_STEPS = (9, 7), 8, 4
LAYOUTS = ((1, 1), (1, 2), (2, 2))  # data x model

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "lamb": lambda params: allstep.optim.LAMB(params, lr=0.02),
    "lars": lambda params: allstep.optim.LARS(params, lr=0.5),
}


class Net(nn.Module):
    """A convolution, whose filters all workers have, and local filters behind it."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.layout = grid.split(SIZE)
        self.conv = Conv2d(grid, self.layout, 2, 3, 3, padding=1, seed=1, dtype=torch.float64)
        self.local = LocallyConnected2d(
            grid, self.conv.out_layout, 3, 2, 1, (2, 1, 1), seed=2, dtype=torch.float64
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.local(torch.tanh(self.conv(x)))


def train(comm: Communicator, data: int, optimizer: str, clip: str | None) -> dict[str, Any]:
    """What comes of it, whole, on rank 0; and what each worker has by itself."""
    mesh = comm.mesh(data=data, model=comm.size // data)
    grid = Grid(mesh["model"])
    model = Net(grid)
    exchange = allstep.attach(model, mesh["data"])
    update = OPTIMIZERS[optimizer](model.parameters())
    norms = []
    for step in range(NUM_STEPS):
        x = values(NUM_SAMPLES, 2, *SIZE, seed=step)[mesh["data"].rank :: data]
        model(local_shard(grid, x, model.layout)).square().sum((1, 2, 3)).mean().backward()
        if clip == "all":
            norms.append(float(exchange.clip_grad_norm_(0.5)))
        if clip == "own":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        update.step()
        update.zero_grad()
    filters = full_tensor(grid, model.local.weight.detach(), model.local.block_layout, first_dim=0)
    return {"norms": norms, "conv": model.conv.weight.detach(), "filters": filters}


@pytest.mark.parametrize(
    ("optimizer", "clip"), [("sgd", "all"), ("sgd", None), ("lamb", None), ("lars", None)]
)
def test_updates_of_local_filters_are_those_of_one_worker(optimizer: str, clip: str | None) -> None:
    expected, *others = (
        run_ranks(data * model, lambda comm, data=data: train(comm, data, optimizer, clip))
        for data, model in LAYOUTS
    )
    for ranks in others:
        for found in ranks:
            assert found["norms"] == pytest.approx(expected[0]["norms"], rel=1e-10)
            torch.testing.assert_close(found["conv"], expected[0]["conv"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            ranks[0]["filters"], expected[0]["filters"], rtol=1e-10, atol=1e-10
        )


@pytest.mark.filterwarnings("ignore")
def test_each_workers_own_norm_makes_another_update() -> None:
    """The control: torch's clipping, as each worker would do it alone."""
    expected, found = (
        run_ranks(model, lambda comm: train(comm, 1, "sgd", "own"))[0] for model in (1, 2)
    )
    assert (found["conv"] - expected["conv"]).abs().max() > 1e-5


def test_a_filter_that_overflows_has_all_workers_skip_the_step() -> None:
    def worker(comm: Communicator) -> float:
        mesh = comm.mesh(data=1, model=comm.size)
        grid = Grid(mesh["model"])
        model = Net(grid)
        exchange = allstep.attach(model, mesh["data"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        x = local_shard(grid, values(2, 2, *SIZE), model.layout)
        scaler.scale(model(x).square().mean()).backward()
        if comm.rank == 0:
            model.local.weight.grad.fill_(torch.inf)
        before = model.conv.weight.detach().clone()
        exchange.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.conv.weight, before)
        return scaler.get_scale()

    assert run_ranks(2, worker) == [2.0, 2.0]


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_optimizers_that_would_make_another_update_are_refused(make: Make) -> None:
    def worker(comm: Communicator) -> None:
        mesh = comm.mesh(data=1, model=comm.size)
        grid = Grid(mesh["model"])
        model = Net(grid)
        allstep.attach(model, mesh["data"])
        optimizer = make(model.parameters())
        model(local_shard(grid, values(2, 2, *SIZE), model.layout)).square().mean().backward()
        with pytest.raises(UsageError, match="each worker has a part"):
            optimizer.step(lambda: torch.zeros(()))

    run_ranks(2, worker)


def test_workers_with_other_filters_can_not_share_an_exchange() -> None:
    """They would all get rank 0's."""

    def worker(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=r'`model.local` has a part .* mesh\["data"\]'):
            allstep.attach(Net(Grid(comm)), comm)
        mesh = comm.mesh(data=2, model=2)
        with pytest.raises(DisagreementError, match="part 0 of its filters"):
            allstep.attach(Net(Grid(mesh["model"])), comm)

    run_ranks(4, worker)


def test_no_checkpoint_of_one_worker_is_made_of_all() -> None:
    def worker(comm: Communicator) -> None:
        mesh = comm.mesh(data=1, model=comm.size)
        model = Net(Grid(mesh["model"]))
        exchange = allstep.attach(model, mesh["data"])
        data = TensorDataset(values(4, 2, *SIZE))
        loader = allstep.data.loader(data, mesh["data"], global_batch=4, micro_batch=2)
        with pytest.raises(UsageError, match=r"`model\.local` has other filters on each worker"):
            allstep.AutoCheckpoint(None, loader, exchange, state={})

    run_ranks(2, worker)
