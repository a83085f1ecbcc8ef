"""Disagreements that come to light a step late, as on CUDA; here with CPU ranks."""

import pytest
import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.exchange import ExchangePolicy, Stale, Synchronous, attach
from allstep.exchange.verdict import Verdict, looks_late
from tests.exchange.nets import clone, mlp
from tests.helpers.ranks import run_ranks

POLICIES = (
    Synchronous(bucket_bytes=64),
    Synchronous(bucket_bytes=64, algorithm="native"),
    Stale(bucket_bytes=64, algorithm="ring", compression="int8", steps=1),
)


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allstep.exchange.sender.looks_late", lambda device: True)


def test_only_cuda_is_late() -> None:
    assert looks_late(torch.device("cuda", 0))
    assert not looks_late(torch.device("cpu"))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_the_same_and_nothing_is_read_in_the_step(
    policy: ExchangePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, xs = mlp(), torch.randn(4, 2, 3, 5, generator=torch.Generator().manual_seed(0))

    def worker(comm: Communicator) -> list[Tensor]:
        model = clone(start, comm)
        exchange = attach(model, comm, policy)
        gradients = []
        for x in xs:
            model(x[comm.rank]).sum().backward()
            gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        for _ in exchange.flush():
            gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return gradients

    settled = []
    settle = Verdict.settle
    monkeypatch.setattr(Verdict, "settle", lambda *args: (settled.append(1), settle(*args)))
    late = run_ranks(2, worker)
    num_late, _ = len(settled), settled.clear()
    monkeypatch.setattr("allstep.exchange.sender.looks_late", lambda device: False)
    soon = run_ranks(2, worker)
    assert num_late < len(settled)
    for ours, theirs in zip(late, soon, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("policy", POLICIES)
def test_who_came_for_something_else_is_found_out_by_all(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> str:
        model = mlp()
        exchange = attach(model, comm, policy)

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
        assert "rank 0: exchange gradients 1" in message
        assert "rank 1: sum running statistics" in message


@pytest.mark.parametrize("policy", POLICIES)
def test_who_fails_stops_all(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> str:
        model = mlp()
        attach(model, comm, policy)

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
