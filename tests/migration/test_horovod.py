"""The lines of docs/migration/horovod.md."""

import torch
from torch import Tensor, nn

import allstep
from allstep.comm import Communicator
from tests.helpers.migration import Page
from tests.helpers.ranks import run_ranks

PAGE = Page("horovod")
PAGE.tried_in("comm/test_initialise.py::test_script_under_torchrun", "`hvd.init()`")
PAGE.tried_in("comm/test_communicator.py::test_close_ends_a_communicator", "`hvd.barrier()`")
PAGE.tried_in(
    "train/test_weights.py::test_sums_over_tokens_are_the_same_on_any_number_of_workers",
    "`hvd.join()`",
)
PAGE.tried_in("train/test_elastic_loop.py::test_killed_at_any_call", "`hvd.elastic`")
PAGE.tried_in("train/test_best.py::test_own_loop_keeps_it_in_an_auto_checkpoint", "Keras's")


@PAGE.tries("`hvd.rank()`", "`hvd.cross_rank()`")
def test_ranks() -> None:
    def places(comm: Communicator) -> tuple[int, ...]:
        return (
            *(comm.rank, comm.size, comm.local_rank, comm.local_size),
            *(comm.node_rank, comm.num_nodes),
        )

    found = run_ranks(4, places, local_size=2)
    assert found == [(rank, 4, rank % 2, 2, rank // 2, 2) for rank in range(4)]


def gradient(comm: Communicator, reduction: str, *, passes: int = 1) -> float:
    """Of a weight by which rank and pass are multiplied."""
    model = nn.Linear(1, 1, bias=False)
    exchange = allstep.attach(model, comm, allstep.Synchronous(reduction=reduction))
    for i in range(passes - 1):
        with exchange.no_sync():
            model(torch.full((1, 1), comm.rank + 10.0 * i)).sum().backward()
    model(torch.full((1, 1), comm.rank + 10.0 * (passes - 1))).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.item()


@PAGE.tries("`hvd.DistributedOptimizer(", "`op=hvd.Average`", "`optimizer.synchronize()`")
def test_average_and_sum() -> None:
    assert run_ranks(3, lambda comm: gradient(comm, "mean")) == [1.0] * 3
    assert run_ranks(3, lambda comm: gradient(comm, "sum")) == [3.0] * 3


@PAGE.tries("`backward_passes_per_step=4`")
def test_several_backward_passes() -> None:
    assert run_ranks(3, lambda comm: gradient(comm, "mean", passes=4)) == [4.0 + 60.0] * 3
    loads = run_ranks(2, lambda comm: updates(comm, global_batch=4 * comm.size * 2))
    assert loads == [(3, 4)] * 2


def updates(comm: Communicator, *, global_batch: int) -> tuple[int, int]:
    """How many updates 48 samples make, and of how many backward passes each."""
    model = nn.Linear(2, 1)
    exchange = allstep.attach(model, comm)
    samples = torch.utils.data.TensorDataset(torch.arange(96.0).view(48, 2))
    loader = allstep.data.loader(samples, comm, global_batch=global_batch, micro_batch=2)
    num_updates, num_passes = 0, 0
    for batch in allstep.steps(loader, exchange):
        for (x,) in batch:
            batch.backward(model(x).square().mean())
            num_passes += 1
        num_updates += 1
    return num_updates, num_passes // num_updates


@PAGE.tries("a learning rate multiplied by")
def test_global_batch_is_the_same_on_any_number_of_workers() -> None:
    for num_workers in (1, 2, 4):
        (num_updates, _), *_ = run_ranks(num_workers, lambda c: updates(c, global_batch=8))
        assert num_updates == 48 // 8


PAGE.tried_in(
    "exchange/test_attach.py::test_attach_broadcasts_rank_0s_parameters_and_buffers",
    "`hvd.broadcast_parameters`",
)


@PAGE.tries("`hvd.allreduce(", "`hvd.grouped_allreduce(", "`hvd.allreduce_async(")
def test_averages() -> None:
    def work(comm: Communicator) -> list[Tensor]:
        one = comm.all_reduce(torch.tensor([comm.rank + 1.0]), "mean")
        group = comm.all_reduce(
            (torch.tensor(comm.rank + 1.0), torch.tensor([comm.rank * 2.0])), "mean"
        )
        x = torch.tensor([comm.rank + 4.0])
        handle = comm.all_reduce(x, "mean", async_op=True)
        handle.wait()
        return [one, *group, x]

    for found in run_ranks(3, work):
        assert [x.item() for x in found] == [2.0, 2.0, 2.0, 5.0]


@PAGE.tries("`hvd.allgather(", "`hvd.broadcast(x, root_rank)`", "`hvd.reducescatter(")
def test_gather_broadcast_reduce_scatter() -> None:
    def work(comm: Communicator) -> tuple[list[float], float, list[float]]:
        gathered = torch.cat(comm.all_gather(torch.full((comm.rank + 1,), float(comm.rank))))
        root = comm.broadcast(torch.tensor([float(comm.rank)]), 1)
        part = comm.reduce_scatter(torch.arange(6.0) * (comm.rank + 1), "mean")
        return gathered.tolist(), root.item(), part.tolist()

    for rank, found in enumerate(run_ranks(3, work)):
        assert found == ([0, 1, 1, 2, 2, 2], 1.0, [4.0 * rank, 4.0 * rank + 2])


@PAGE.tries("`hvd.alltoall(")
def test_all_to_all_by_splits() -> None:
    def work(comm: Communicator) -> tuple[list[int], list[int]]:
        x, splits = torch.arange(4) + 10 * comm.rank, [1 + 2 * comm.rank, 3 - 2 * comm.rank]
        uneven = torch.cat(comm.all_to_all(x.split(splits)))
        even = torch.cat(comm.all_to_all(x.chunk(comm.size)))
        return uneven.tolist(), even.tolist()

    assert run_ranks(2, work) == [
        ([0, 10, 11, 12], [0, 1, 10, 11]),
        ([1, 2, 3, 13], [2, 3, 12, 13]),
    ]


@PAGE.tries("`hvd.broadcast_object`", "data on rank 0 only")
def test_objects_and_data_of_rank_0() -> None:
    def work(comm: Communicator) -> tuple[object, object, list[int]]:
        words = comm.broadcast_object({"lr": 0.1} if comm.rank == 0 else None)
        ranks = comm.all_gather_object(comm.rank)
        own = (torch.ones(5, 2), torch.arange(5)) if comm.rank == 0 else None
        x, y = comm.broadcast(own)
        return words, ranks, [*x.shape, *y.tolist()]

    assert run_ranks(2, work) == [({"lr": 0.1}, [0, 1], [5, 2, 0, 1, 2, 3, 4])] * 2


@PAGE.tries("`hvd.ProcessSet(")
def test_process_set() -> None:
    def work(comm: Communicator) -> float | None:
        part = comm.split(0 if comm.rank in (0, 2) else None, comm.rank)
        return part and part.all_reduce(torch.tensor([comm.rank + 1.0])).item()

    assert run_ranks(3, work) == [4.0, None, 4.0]


def test_every_line_is_tried() -> None:
    assert PAGE.untried() == []
