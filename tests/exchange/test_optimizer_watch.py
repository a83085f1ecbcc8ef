"""Optimizers that would train another model, or only some workers', are refused at their step."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.exchange import attach
from allstep.nn import Chain, ChainPart
from tests.exchange.nets import mlp, shard
from tests.helpers.ranks import run_ranks

SIZES = [1, 2]
IN_BACKWARD = r"`SGD\.step\(\)` was called in a backward pass.*Call it after the backward pass"


def step_in_backward(model: nn.Module) -> None:
    """As in torch's tutorial on it."""
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())


def torchs_own(model: nn.Module) -> None:
    with warnings.catch_warnings(action="ignore"):  # an old decorator of torch's own
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("hook", [step_in_backward, torchs_own])
def test_an_optimizer_in_backward_is_refused(
    hook: Callable[[nn.Module], None], is_first: bool, size: int
) -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        if is_first:
            hook(model)
        attach(model, comm)
        if not is_first:
            hook(model)
        before = copy.deepcopy(list(model.parameters()))
        with pytest.raises(UsageError, match=IN_BACKWARD):
            model(torch.ones(2, 5)).sum().backward()
        torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)

    run_ranks(size, worker)


@pytest.mark.parametrize("size", SIZES)
def test_a_hook_that_only_looks_is_left_alone(size: int) -> None:
    def worker(comm: Communicator) -> None:
        model, seen = mlp(), []
        exchange = attach(model, comm)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
        assert len(seen) == 12
        exchange.detach()
        step_in_backward(model)  # by now it is nobody's business
        model(torch.ones(2, 5)).sum().backward()

    run_ranks(size, worker)


def loader_of(comm: Communicator) -> Any:
    samples = TensorDataset(torch.ones(8, 5), torch.ones(8, 1))
    return allstep.data.loader(samples, comm, global_batch=8, micro_batch=2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("trained", ["original", "copy"])
def test_an_optimizer_of_a_copy_is_refused(trained: str, size: int) -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        copied = copy.deepcopy(model)
        optimizer = torch.optim.Adam(copied.parameters())
        exchange = attach(model, comm)
        for batch in allstep.steps(loader_of(comm), exchange):
            for x, y in batch:
                net = model if trained == "original" else copied
                batch.backward((net(x) - y).square().mean())
            with pytest.raises(UsageError, match=r"The Adam makes a step, .* `model\.parameters"):
                optimizer.step()

    run_ranks(size, worker)


@pytest.mark.parametrize("size", SIZES)
def test_an_optimizer_of_a_copy_is_refused_without_steps(size: int) -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
        attach(model, comm)
        model(torch.ones(2, 5)).sum().backward()
        with pytest.raises(UsageError, match=r"The SGD makes a step, and holds no parameter"):
            optimizer.step()

    run_ranks(size, worker)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_beside_the_attached_model_are_refused(size: int) -> None:
    """Such as a criterion's: each worker would train its own."""

    def worker(comm: Communicator, is_joined: bool) -> None:
        model, scale = mlp(), nn.Linear(1, 1)
        net = nn.Sequential(model, scale)
        exchange = attach(net if is_joined else model, comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        (net if is_joined else lambda x: scale(model(x)))(torch.ones(2, 5)).sum().backward()
        words = r"a parameter of shape \(1, 1\) with a gradient, beside.*`torch.nn.ModuleList"
        with nullcontext() if is_joined else pytest.raises(UsageError, match=words):
            optimizer.step()
        exchange.detach()
        optimizer.step()

    for is_joined in (True, False):
        run_ranks(size, lambda comm, is_joined=is_joined: worker(comm, is_joined))


@pytest.mark.parametrize("size", SIZES)
def test_other_models_have_optimizers_of_their_own(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A probe, layers that join, several models under one optimizer, frozen parameters."""

    def worker(comm: Communicator) -> None:
        model, second, probe = mlp(), nn.Linear(5, 1), nn.Linear(5, 1)
        attach(model, comm)
        attach(second, comm)
        both = torch.optim.SGD([*model.parameters(), *second.parameters()], lr=0.1)
        alone = torch.optim.SGD(probe.parameters(), lr=0.1)
        x = torch.ones(2, 5)
        for step in range(3):
            probe(x).sum().backward()
            if step == 1:
                model.append(nn.Linear(1, 1))
                both.add_param_group({"params": model[-1].parameters()})
                model[0].requires_grad_(False)
            alone.step()
            for net in (model, second):
                net(x).sum().backward()
            both.step()
            for optimizer in (alone, both):
                optimizer.zero_grad()
            alone.step()

    run_ranks(size, worker)
    told = [r.getMessage() for r in caplog.records if "was not attached" in r.getMessage()]
    assert len(told) == (size > 1)
    assert all("the SGD trains a model" in words for words in told)


def test_copies_that_are_trained_one_after_the_other_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The inner loop of first-order MAML makes an optimizer for each."""

    def worker(comm: Communicator) -> None:
        model = mlp()
        attach(model, comm)
        for _ in range(3):
            adapted = copy.deepcopy(model)
            inner = torch.optim.SGD(adapted.parameters(), lr=0.1)
            adapted(torch.ones(2, 5)).sum().backward()
            inner.step()
            model(torch.ones(2, 5)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()

    run_ranks(2, worker)
    assert caplog.text.count("trains a model that was not attached") == 1


def train_by_lbfgs(
    comm: Communicator, start: nn.Module, batch: tuple[Tensor, Tensor], loss_of: str
) -> list[Tensor]:
    model = copy.deepcopy(start)
    attach(model, comm)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    x, y = (shard(part, comm) for part in batch)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return comm.all_reduce(loss.detach().clone(), "mean") if loss_of == "all" else loss

    for _ in range(3):
        optimizer.step(closure)
    return list(model.parameters())


def test_lbfgs_with_the_mean_loss_equals_one_process() -> None:
    torch.manual_seed(3)
    start, batch = mlp(), (torch.randn(12, 5), torch.randn(12, 1))
    (expected,) = run_ranks(1, lambda comm: train_by_lbfgs(comm, start, batch, "own"))
    for size in (2, 3):
        for found in run_ranks(size, lambda comm: train_by_lbfgs(comm, start, batch, "all")):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_lbfgs_with_a_workers_own_loss_is_refused() -> None:
    start, batch = mlp(), (torch.randn(12, 5), torch.randn(12, 1))

    def worker(comm: Communicator) -> None:
        words = r"evaluate an optimizer's closure again.*loss.*`batch\.global_loss\(\)` in `steps`"
        with pytest.raises(DisagreementError, match=words):
            train_by_lbfgs(comm, start, batch, "own")

    run_ranks(2, worker)


def test_lbfgs_in_steps_with_the_global_loss_equals_one_process() -> None:
    torch.manual_seed(4)
    start, samples = mlp(), TensorDataset(torch.randn(20, 5), torch.randn(20, 1))

    def train(comm: Communicator) -> list[Tensor]:
        model = copy.deepcopy(start)
        exchange = attach(model, comm)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        loader = allstep.data.loader(samples, comm, global_batch=8, micro_batch=4)
        for batch in allstep.steps(loader, exchange, replay=True):

            def closure(batch: Any = batch) -> float:
                optimizer.zero_grad()
                for x, y in batch:
                    batch.backward((model(x) - y).square().mean())
                return batch.global_loss()

            optimizer.step(closure)
        return list(model.parameters())

    (expected,) = run_ranks(1, train)
    for size in (2, 5):
        for found in run_ranks(size, train):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_a_closure_that_is_called_once_may_return_the_workers_own_loss() -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        attach(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> Tensor:
            loss = model(torch.full((1, 5), float(comm.rank))).sum()
            loss.backward()
            return loss

        optimizer.step(closure=closure)

    run_ranks(2, worker)


def without_hooks(loss: Tensor, model: nn.Module, exchange: allstep.Exchange) -> None:
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient


def in_no_sync(loss: Tensor, model: nn.Module, exchange: allstep.Exchange) -> None:
    with exchange.no_sync():
        loss.backward()


def synchronized(loss: Tensor, model: nn.Module, exchange: allstep.Exchange) -> None:
    without_hooks(loss, model, exchange)
    exchange.synchronize()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("make_gradients", [without_hooks, in_no_sync, synchronized])
def test_an_update_with_gradients_that_were_not_exchanged_is_told_of(
    make_gradients: Callable[[Tensor, nn.Module, allstep.Exchange], None],
    is_first: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def worker(comm: Communicator) -> Tensor:
        model = nn.Linear(5, 1)
        nn.init.zeros_(model.weight)
        exchange = attach(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(torch.ones(2, 5) * (comm.rank + 1)).sum()
            if step == 0 and not is_first:
                loss.backward()
            else:
                make_gradients(loss, model, exchange)
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    found = run_ranks(2, worker)
    is_same = make_gradients is synchronized
    assert torch.equal(*found) == is_same
    assert caplog.text.count("no gradient was exchanged since its last one") == (not is_same)


def test_lbfgs_of_a_part_of_the_model_is_refused() -> None:
    """Each worker would take a direction and a length of its own."""

    def worker(comm: Communicator) -> None:
        parts = [
            ChainPart("first", lambda: nn.Linear(2, 3), 0, ("x",), ("hidden",)),
            ChainPart("second", lambda: nn.Linear(3, 1), comm.size - 1, ("hidden",), ("y",)),
        ]
        mesh = comm.mesh(data=1, model=comm.size)
        model = Chain(parts, mesh, inputs=("x",), outputs=("y",))
        attach(model, mesh["data"])
        values, delegate = model(x=torch.ones(4, 2))
        (sum(y.sum() for y in values.values()) + delegate).backward()
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(UsageError, match="The LBFGS looks at all parameters at once"):
            optimizer.step(lambda: torch.zeros(()))

    run_ranks(2, worker)
