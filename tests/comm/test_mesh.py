"""Named axes over workers, and a divided model trained on divided data over them."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator, Mesh
from allstep.comm.autograd import all_reduce
from allstep.errors import DisagreementError, UsageError
from allstep.nn import replicated
from tests.helpers.compare import equal
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize(
    "axes",
    [{"data": 1}, {"data": 2, "model": 2}, {"a": 2, "b": 1, "c": 3}, {"a": 2, "b": 2, "c": 2}],
)
def test_mesh_axes_are_those_of_torch(axes):
    """Along an axis are the ranks of an array in row-major order."""
    shape = tuple(axes.values())
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)

    def work(comm: Communicator) -> None:
        mesh = comm.mesh(**axes)
        place = tuple(mesh.coordinates.values())
        assert ranks[place] == comm.rank
        for dim, name in enumerate(axes):
            line = ranks.movedim(dim, -1)[(*place[:dim], *place[dim + 1 :])]
            assert mesh[name].all_gather_object(comm.rank) == line.tolist()
            assert mesh[name].rank == mesh.coordinates[name]
            assert (mesh[name] is comm) == (axes[name] == comm.size)

    run_ranks(ranks.numel(), work)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3, "model": 2}, r"data=3 x model=2 are 6 workers, and there are 4"),
        ({"data": 4, "model": 0}, r"`model` \(=0\) must be an int of at least 1"),
        ({"data": True}, r"`data` \(=True\) must be an int"),
        ({}, r"`axes` is empty: choose lengths whose product is 4"),
    ],
)
def test_mesh_refuses_axes_that_are_not_of_the_workers(axes, message):
    with pytest.raises(UsageError, match=message):
        run_ranks(4, lambda comm: comm.mesh(**axes))


def test_mesh_that_workers_name_otherwise():
    def work(comm: Communicator) -> None:
        comm.mesh(data=2, model=1) if comm.rank else comm.mesh(data=1, model=2)

    with pytest.raises(DisagreementError, match=r"rank 0 wants: make a mesh of .*'model': 2"):
        run_ranks(2, work)


def test_mesh_without_such_an_axis():
    mesh = Communicator.single_process().mesh(data=1)
    with pytest.raises(UsageError, match=r"`name` \(='model'\) is no axis .* one of 'data'"):
        mesh["model"]


def test_device_mesh_needs_the_default_group():
    with pytest.raises(UsageError, match="default group to be these 1 workers, and it has 0"):
        Communicator.single_process().mesh(data=1).device_mesh()


def _device_mesh(comm: Communicator) -> list:
    mesh = comm.mesh(data=2, model=2)
    of_torch = mesh.device_mesh()
    assert mesh.device_mesh() is of_torch
    x = torch.ones(1) * comm.rank
    torch.distributed.all_reduce(x, group=of_torch["model"].get_group())
    return [of_torch.mesh_dim_names, of_torch.get_coordinate(), mesh.coordinates, x.item()]


@pytest.mark.process
def test_device_mesh_has_the_same_axes():
    for rank, (names, of_torch, own, total) in enumerate(run_processes(4, _device_mesh)):
        assert names == ("data", "model")
        assert tuple(of_torch) == tuple(own.values()) == (rank // 2, rank % 2)
        assert total == (1 if rank < 2 else 5)


def _alone_along_an_axis(comm: Communicator) -> str:
    usual_s = comm.timeout_s
    comm.set_timeout(1.0)
    group = comm.mesh(tensor=2).device_mesh()["tensor"].get_group()
    comm.set_timeout(usual_s)
    assert group is not torch.distributed.group.WORLD
    message = ""
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out") as error:
            torch.distributed.all_reduce(torch.ones(1), group=group)
        message = str(error.value)
    comm.barrier()
    return message


@pytest.mark.process
def test_device_mesh_has_groups_and_the_timeout_of_its_own():
    """Torch's engine and the communicator share no order of calls."""
    assert "1000ms" in run_processes(2, _alone_along_an_axis)[0]


HIDDEN, SAMPLES = 12, 44


class DividedMLP(nn.Module):
    """Hidden units divided over the workers of `comm`; the output's bias is on all of them."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        first = torch.randn(HIDDEN, 3, generator=generator, dtype=torch.float64)
        second = torch.randn(2, HIDDEN, generator=generator, dtype=torch.float64)
        self.comm = comm
        own = slice(HIDDEN * comm.rank // comm.size, HIDDEN * (comm.rank + 1) // comm.size)
        self.first, self.second = nn.Parameter(first[own]), nn.Parameter(second[:, own].clone())
        self.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.first.T) @ self.second.T
        if self.comm.size > 1:
            y = all_reduce(self.comm, y)
        (bias,) = replicated(self.comm, [self.bias])
        assert bias is not None
        return y + bias

    def whole(self) -> list[Tensor]:
        first = torch.cat(self.comm.all_gather(self.first.detach()))
        second = torch.cat(self.comm.all_gather(self.second.detach()), 1)
        return [first, second, self.bias.detach()]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :2].sin())


Axes = Mapping[str, Communicator] | Mesh[Communicator]


def by_mesh(comm: Communicator, num_data: int) -> Axes:
    return comm.mesh(data=num_data, model=comm.size // num_data)


def by_hand(comm: Communicator, num_data: int) -> Axes:
    """The same axes by two splits."""
    copy, part = divmod(comm.rank, comm.size // num_data)
    return {"data": comm.split(part, copy), "model": comm.split(copy, part)}


def train(
    comm: Communicator,
    num_data: int,
    make_axes: Callable[[Communicator, int], Axes] = by_mesh,
    policy: allstep.ExchangePolicy | None = None,
) -> tuple[list[Tensor], float]:
    """Four epochs of a user's loop over the axis of data; micro-batches of 4, a short last one."""
    axes = make_axes(comm, num_data)
    model = DividedMLP(axes["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = allstep.attach(model, axes["data"], policy)
    share = 1 / axes["model"].size  # each of those who share a model has a part of its loss
    with allstep.data.loader(
        data(), axes["data"], global_batch=20, micro_batch=4, seed=2
    ) as loader:
        while loader.epoch < 4:
            for batch in allstep.steps(loader, exchange):
                for x, y in batch:
                    batch.backward(share * (model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    def errors(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict:
        return {"error": ((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))}

    evaluator = allstep.Evaluator(errors, data(), axes["data"], micro_batch=5)
    return model.whole(), evaluator(model)["error"]


MADE = [by_mesh, by_hand]


@pytest.mark.parametrize("make_axes", MADE)
@pytest.mark.parametrize(("size", "num_data"), [(2, 1), (2, 2), (4, 2), (6, 3), (8, 2)])
def test_divided_model_on_divided_data_is_that_of_one_worker(size, num_data, make_axes):
    """Micro-batches fall unevenly; the evaluator counts each sample once."""
    ((alone, error),) = run_ranks(1, lambda comm: train(comm, 1))
    for parameters, found in run_ranks(size, lambda comm: train(comm, num_data, make_axes)):
        for x, y in zip(parameters, alone, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        assert found == pytest.approx(error, abs=1e-10)


@pytest.mark.parametrize("make_axes", MADE)
def test_exact_sums_over_an_axis_have_the_bits_of_one_copy(make_axes):
    """Of two workers; the control's float sums differ."""

    def copies(num_data: int, compression: str) -> list[list[Tensor]]:
        policy = allstep.Synchronous(compression=compression)
        found = run_ranks(2 * num_data, lambda comm: train(comm, num_data, make_axes, policy))
        return [parameters for parameters, _ in found]

    one, *_ = copies(1, "exact")
    for num_data in (2, 3):
        assert all(equal(found, one) for found in copies(num_data, "exact")), num_data
    assert not equal(copies(2, "fp32")[0], copies(1, "fp32")[0])


def test_divided_model_attached_to_all_workers_is_another():
    """The control: over all workers the parts would become one part's copies."""

    def work(comm: Communicator) -> list[Tensor]:
        mesh = comm.mesh(data=2, model=2)
        model = DividedMLP(mesh["model"])
        before = model.whole()[0]
        allstep.attach(model, comm).detach()
        return [before, model.whole()[0]]

    before, after = run_ranks(4, work)[0]
    assert (before - after).abs().max() > 0.1
