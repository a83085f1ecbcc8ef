"""Disagreements that come to light a step late, as on CUDA; here with CPU ranks."""

import copy

import pytest
import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.device import has_streams
from allstep.errors import DisagreementError, UsageError
from allstep.exchange import ExchangePolicy, Stale, Synchronous
from allstep.exchange.overlapped import OverlappedExchange
from tests.exchange.nets import mlp
from tests.helpers.ranks import run_ranks

POLICIES = (
    Synchronous(bucket_bytes=64),
    Synchronous(bucket_bytes=64, algorithm="native"),
    Stale(bucket_bytes=64, algorithm="ring", compression="int8", steps=1),
)


def attached(
    model: nn.Module, comm: Communicator, policy: ExchangePolicy, *, is_late: bool = True
) -> OverlappedExchange:
    """For models that are the same on every worker."""
    return OverlappedExchange(model, comm, policy, is_read_late=is_late)


def test_only_cuda_is_read_late() -> None:
    assert has_streams(torch.device("cuda", 0))
    assert not has_streams(torch.device("cpu"))


@pytest.mark.parametrize("policy", POLICIES)
def test_late_reading_gives_the_same_gradients(policy: ExchangePolicy) -> None:
    start, xs = mlp(), torch.randn(4, 2, 3, 5, generator=torch.Generator().manual_seed(0))

    def worker(comm: Communicator, is_late: bool) -> list[Tensor]:
        model = copy.deepcopy(start)
        exchange = attached(model, comm, policy, is_late=is_late)
        gradients = []
        for x in xs:
            model(x[comm.rank]).sum().backward()
            gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        for _ in exchange.flush():
            gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return gradients

    late = run_ranks(2, lambda comm: worker(comm, True))
    soon = run_ranks(2, lambda comm: worker(comm, False))
    for ours, theirs in zip(late, soon, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("is_late", "num_updates"), [(True, 1), (False, 0)])
def test_late_reading_finds_a_disagreement_one_step_later(is_late: bool, num_updates: int) -> None:
    """With the step that is not to be used; so no step makes the host wait for the device."""
    start = mlp()

    def worker(comm: Communicator) -> int:
        model = copy.deepcopy(start)
        exchange = attached(model, comm, POLICIES[1], is_late=is_late)
        num_done = 0
        with pytest.raises(DisagreementError):
            for step in range(3):
                if comm.rank and not step:
                    with exchange.no_sync():
                        model(torch.ones(2, 5)).sum().backward()
                model(torch.ones(2, 5)).sum().backward()
                num_done += 1
        return num_done

    assert run_ranks(2, worker, timeout_s=20) == [num_updates] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_late_reading_tells_all_who_came_for_something_else(policy: ExchangePolicy) -> None:
    start = mlp()

    def worker(comm: Communicator) -> str:
        model = copy.deepcopy(start)
        exchange = attached(model, comm, policy)

        def step() -> None:
            model(torch.ones(2, 5)).sum().backward()

        step()
        with pytest.raises(DisagreementError) as caught:
            if comm.rank:
                exchange.sync_buffers()
            else:
                for _ in range(2 + policy.staleness):
                    step()
        return str(caught.value)

    for message in run_ranks(2, worker, timeout_s=20):
        assert "rank 0 wants: exchange gradients 1" in message
        assert "rank 1 wants: sum running statistics" in message


@pytest.mark.parametrize("policy", POLICIES)
def test_late_reading_stops_all_when_one_fails(policy: ExchangePolicy) -> None:
    start = mlp()

    def worker(comm: Communicator) -> str:
        model = copy.deepcopy(start)
        attached(model, comm, policy)

        def step() -> None:
            model(torch.ones(2, 5, dtype=next(model.parameters()).dtype)).sum().backward()
            model.zero_grad()

        step()
        if comm.rank:
            model.float()
        with pytest.raises((UsageError, DisagreementError)) as caught:
            for _ in range(4):
                step()
        return str(caught.value)

    for message in run_ranks(2, worker, timeout_s=20):
        assert "was [" in message and "at `attach`" in message
