"""What the exact format makes of `p.grad` between the backward passes that it adds up."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.exchange import Synchronous, attach
from tests.exchange.nets import Ignoring
from tests.helpers.ranks import run_ranks

EXACT = Synchronous(algorithm="native", compression="exact")


def linear(*weights: float) -> nn.Linear:
    model = nn.Linear(len(weights), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    return model


def of_steps(comm: Communicator, between: Callable[[nn.Linear], object]) -> list[float]:
    """The gradient of a global batch of 1, 2, 3, 4; something is done after each micro-batch."""
    model = linear(1.0)
    exchange = attach(model, comm, EXACT)
    samples = TensorDataset(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    loader = allstep.data.loader(samples, comm, global_batch=4, micro_batch=1, seed=0)
    for batch in allstep.steps(loader, exchange):
        for (x,) in batch:
            batch.backward(model(x).mean())
            if not batch.micro_batch.is_last:
                between(model)
    return model.weight.grad.flatten().tolist()


def test_exact_refuses_a_changed_partial_sum_on_all_workers() -> None:
    """The half of it would count more, the more workers there are."""

    def worker(comm: Communicator) -> None:
        with pytest.raises((UsageError, DisagreementError), match="` of `weight` was changed"):
            of_steps(comm, lambda model: model.weight.grad.mul_(0.5) if comm.rank else None)

    run_ranks(2, worker, timeout_s=20)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_exact_zero_grad_between_micro_batches(set_to_none: bool) -> None:
    def worker(comm: Communicator) -> list[float]:
        return of_steps(comm, lambda model: model.zero_grad(set_to_none=set_to_none))

    order = run_ranks(4, lambda comm: of_steps(comm, lambda model: None))
    assert order == [[2.5]] * 4
    alone = run_ranks(1, worker)[0]
    assert alone[0] in (0.25, 0.5, 0.75, 1.0)  # what came last
    for found in run_ranks(2, worker):
        assert found[0] < 2.5


def test_exact_p_grad_is_the_local_sum_until_the_exchange() -> None:
    def worker(comm: Communicator) -> list[float]:
        model = linear(1.0)
        exchange = attach(model, comm, EXACT)
        seen = []
        with exchange.no_sync():
            for x in (1.0, 2.0):
                model(torch.full((1, 1), x + comm.rank)).sum().backward()
                seen.append(model.weight.grad.item())
        model(torch.full((1, 1), 4.0)).sum().backward()
        return [*seen, model.weight.grad.item()]

    assert run_ranks(2, worker) == [[1.0, 3.0, 8.0], [2.0, 5.0, 8.0]]


def test_exact_keeps_partial_sums_when_parameters_join() -> None:
    """Its whole numbers, not what float32 can hold of them."""

    def worker(comm: Communicator) -> float:
        model = nn.Sequential(linear(1.0)).to(torch.float32)
        exchange = attach(model, comm, EXACT)
        with exchange.no_sync():
            for x in (1024.0, 2.0**-20, -1024.0):
                model(torch.full((1, 1), x, dtype=torch.float32)).sum().backward()
        assert model[0].weight.grad.item() == 0
        model.append(linear(1.0).to(torch.float32))
        model(torch.zeros(1, 1, dtype=torch.float32)).sum().backward()
        return model[0].weight.grad.item()

    assert run_ranks(2, worker) == [2.0**-20] * 2


def test_exact_undefined_gradient_keeps_p_grad() -> None:
    def worker(comm: Communicator) -> tuple[float, float]:
        model = Ignoring()
        attach(model, comm, EXACT)
        model.ignored.grad = torch.full((1,), comm.rank + 1.0)
        for _ in range(2):
            model().sum().backward()
        return model.used.grad.item(), model.ignored.grad.item()

    assert run_ranks(2, worker) == [(2.0, 1.5)] * 2


def test_exact_respects_users_gradient_hooks() -> None:
    def worker(comm: Communicator) -> float:
        model = linear(1.0)
        attach(model, comm, EXACT)
        model.weight.register_hook(lambda gradient: 3 * gradient)
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()
        return model.weight.grad.item()

    assert run_ranks(2, worker) == [6.0, 6.0]
