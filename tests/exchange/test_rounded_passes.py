"""Exact sums round a backward pass's gradients apart from what `p.grad` held before it."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep.comm import Communicator
from allstep.exchange import Exchange, Synchronous, attach
from tests.exchange.nets import Failing
from tests.helpers.ranks import run_ranks

EXACT = Synchronous(compression="exact")
SMALL, LARGE = 8, 200  # widths of layers whose gradients are rounded behind a pass, and in it


def net(width: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width)).float()


def samples(num: int) -> Tensor:
    return torch.randn(num, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float32)


def warmed_up(model: nn.Module, exchange: Exchange) -> None:
    """Gives the grid its units."""
    with exchange.global_batch(0):
        exchange.begin_micro_batch()
        model(samples(4)).square().mean().backward()
    model.zero_grad()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() / 2


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_gradients_add_up_between_passes(width: int) -> None:
    model, parts = net(width), samples(8).split(4)
    exchange = attach(model, Communicator.single_process(), EXACT)
    warmed_up(model, exchange)
    with exchange.global_batch(1, num_micro_batches=2):
        for num in (1, 2):
            exchange.begin_micro_batch()
            with exchange.no_sync():
                loss_of(model, parts[num - 1]).backward()
            plain = net(width)
            sum(loss_of(plain, x) for x in parts[:num]).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
            before = [p.grad for p in model.parameters()]
            torch.autograd.grad(loss_of(model, parts[0]), list(model.parameters()))
            assert all(p.grad is x for p, x in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_hooks_of_others_see_gradients_as_they_add_up(width: int) -> None:
    """As without the exchange, where each pass adds to `p.grad`."""
    plain, model, parts = net(width), net(width), samples(12).split(4)
    found: dict[nn.Module, list[Tensor]] = {plain: [], model: []}
    for each in found:
        each[0].weight.register_post_accumulate_grad_hook(
            lambda p, each=each: found[each].append(p.grad.clone())
        )
    exchange = attach(model, Communicator.single_process(), EXACT)
    warmed_up(model, exchange)
    found[model].clear()
    with exchange.global_batch(1, num_micro_batches=3):
        for x in parts:
            exchange.begin_micro_batch()
            with exchange.no_sync() if x is not parts[-1] else nullcontext():
                loss_of(model, x).backward()
            loss_of(plain, x).backward()
    torch.testing.assert_close(found[model], found[plain], rtol=1e-3, atol=1e-5)


def trained(
    comm: Communicator, start: nn.Module, loss: Callable[[nn.Module, Tensor, int], Tensor]
) -> list[Tensor]:
    """The parameters after four global batches of five micro-batches."""
    model = copy.deepcopy(start)
    exchange = attach(model, comm, EXACT)
    data = TensorDataset(samples(40), torch.arange(40))
    loader = allstep.data.loader(data, comm, global_batch=10, micro_batch=2, shuffle=False)
    for batch in allstep.steps(loader, exchange):
        for x, numbers in batch:
            batch.backward(loss(model, x, int(numbers[0])))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()
    return list(model.parameters())


def test_passes_that_go_around_the_models_output_have_the_same_bits() -> None:
    """No hook says that they begin, so that each of their gradients is rounded on its own."""

    def loss(model: nn.Module, x: Tensor, number: int) -> Tensor:
        whole = number % 3 < 2
        return (model(x) if whole else model[2](model[0](x))).square().mean()

    start = net(SMALL)  # here, for threads share the generator
    alone = trained(Communicator.single_process(), start, loss)
    for size in (2, 3, 5):
        for found in run_ranks(size, lambda comm: trained(comm, start, loss)):
            assert all(map(torch.equal, found, alone)), size


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("is_suspended", [True, False])
def test_a_pass_that_fails_loses_no_gradient_of_earlier_ones(
    width: int, is_suspended: bool
) -> None:
    model, parts = net(width), samples(12).split(4)
    exchange = attach(model, Communicator.single_process(), EXACT)
    warmed_up(model, exchange)
    fails = pytest.raises(ArithmeticError, match="in backward")
    with fails, exchange.global_batch(1, num_micro_batches=3):
        exchange.begin_micro_batch()
        with exchange.no_sync():
            loss_of(model, parts[0]).backward()
        before = [p.grad.clone() for p in model.parameters()]
        exchange.begin_micro_batch()
        model[1].register_forward_hook(lambda _module, _args, output: Failing.apply(output))
        with exchange.no_sync() if is_suspended else nullcontext():
            loss_of(model, parts[1]).backward()
    first, last = model[0].weight, model[2].weight  # which the pass has not reached, and has
    assert torch.equal(first.grad, before[0])
    assert last.grad is not None
    assert last.grad.shape == before[2].shape
    assert not torch.equal(last.grad, before[2])
