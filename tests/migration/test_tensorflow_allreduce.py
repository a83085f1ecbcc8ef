"""The lines of docs/migration/tensorflow-allreduce.md."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import allstep
from allstep.comm import Communicator
from allstep.errors import DisagreementError
from tests.helpers.migration import ROOT, Page
from tests.helpers.ranks import run_ranks

PAGE = Page("tensorflow-allreduce")
PAGE.tried_in(
    "comm/test_initialise.py::test_script_under_mpirun", "`mpi.Session()`", "`InitCollectives("
)
PAGE.tried_in("comm/test_initialise.py::test_script_under_torchrun", "`mpi.rank()`")
PAGE.tried_in(
    "train/test_steps.py::test_global_loss_is_that_of_the_whole_batch", "the average loss"
)
PAGE.tried_in(
    "exchange/test_overlapped.py::test_buckets_follow_rank_0s_order_of_gradients",
    "one session's thread",
)


@PAGE.tries("`mpi.allreduce(x, average=False)`", "`RingAllreduce(")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_allreduce_and_ring_leave_the_input(dtype: torch.dtype) -> None:
    def work(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.arange(17, dtype=dtype) * (comm.rank + 1)
        total, ring = comm.all_reduce(x.clone()), comm.all_reduce(x.clone(), algorithm="ring")
        assert total.dtype == dtype
        return x, total, ring

    for rank, (x, total, ring) in enumerate(run_ranks(3, work)):
        assert torch.equal(x, torch.arange(17, dtype=dtype) * (rank + 1))
        assert torch.equal(total, torch.arange(17, dtype=dtype) * 6)
        assert torch.equal(ring, total)


@PAGE.tries("`mpi.allreduce(x)`")
def test_allreduce_of_the_average() -> None:
    results = run_ranks(3, lambda comm: comm.all_reduce(torch.tensor([comm.rank + 1.0]), "mean"))
    assert [result.item() for result in results] == [2.0, 2.0, 2.0]


@PAGE.tries("`mpi.allgather(", "`RingAllgather(")
def test_allgather_of_unequal_lengths() -> None:
    def work(comm: Communicator) -> Tensor:
        return torch.cat(comm.all_gather(torch.full((comm.rank + 1, 2), float(comm.rank))))

    for result in run_ranks(3, work):
        assert result[:, 0].tolist() == [0, 1, 1, 2, 2, 2]


@PAGE.tries("other shapes or types")
def test_allreduce_of_unequal_shapes_names_the_ranks() -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(DisagreementError) as caught:
            comm.all_reduce(torch.ones(2 + comm.rank), check=True)
        return str(caught.value)

    for words in run_ranks(2, work):
        assert "rank 0" in words and "rank 1" in words


@PAGE.tries("`mpi.DistributedOptimizer(")
def test_the_page_s_script_takes_the_mean_of_the_workers() -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(1, 4, generator=generator, dtype=torch.float64)

    def work(comm: Communicator) -> Tensor:
        model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(weight + comm.rank)  # rank 0's count
        allstep.attach(model, comm)
        model(inputs[comm.rank]).square().mean().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    whole = weight.clone().requires_grad_()
    (inputs.flatten(0, 1) @ whole.T).square().mean().backward()
    assert whole.grad is not None
    for gradient in run_ranks(2, work):
        torch.testing.assert_close(gradient, whole.grad, rtol=0, atol=1e-12)
    own = weight.clone().requires_grad_()  # what a worker would have had alone
    (inputs[0] @ own.T).square().mean().backward()
    assert own.grad is not None and (own.grad - whole.grad).abs().max() > 1e-3


@PAGE.tries("`allreduce-test cpu`")
def test_benchmark_of_allreduce() -> None:
    script = ROOT / "benchmarks/bench_allreduce.py"
    subprocess.run([sys.executable, script, "--help"], check=True, capture_output=True)


def test_every_line_is_tried() -> None:
    assert PAGE.untried() == []
