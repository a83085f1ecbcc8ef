"""Parameters that join, leave, or change their mind."""

import copy
import gc
import threading
import time

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from allstep.comm import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.exchange import ExchangePolicy, Synchronous, attach
from allstep.exchange.parameters import ParameterSet
from tests.exchange.nets import assert_same, clone, gradients, mlp, shard, states
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_module_added_later_takes_part(size: int, policy: ExchangePolicy) -> None:
    start, late = mlp(), nn.Sequential(nn.Tanh(), nn.Linear(1, 2))
    batches = torch.randn(4, 12, 5)

    def train(model: nn.Module, late: nn.Module, parts: list[Tensor]) -> dict[str, Tensor]:
        for step, part in enumerate(parts):
            if step == 2:
                model.append(late)
            model(part).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
            model.zero_grad()
        return states(model)

    def worker(comm: Communicator) -> dict[str, Tensor]:
        model = clone(start, comm)
        attach(model, comm, policy)
        return train(model, clone(late, comm), [shard(batch, comm) for batch in batches])

    expected = train(copy.deepcopy(start), copy.deepcopy(late), list(batches))
    for actual in run_ranks(size, worker):
        assert_same(actual, expected)


def test_parameters_switched_on_and_off(policy: ExchangePolicy) -> None:
    start, batches = mlp(), torch.randn(4, 8, 5)

    def run(model: nn.Module, parts: list[Tensor]) -> list[dict[str, Tensor | None]]:
        seen = []
        for step, part in enumerate(parts):
            model[0].requires_grad_(step in (1, 2))
            model.zero_grad()
            model(part).square().mean().backward()
            seen.append(gradients(model))
        return seen

    def worker(comm: Communicator) -> list[dict[str, Tensor | None]]:
        model = clone(start, comm)
        model[0].requires_grad_(False)
        attach(model, comm, policy)
        return run(model, [shard(batch, comm) for batch in batches])

    expected = run(copy.deepcopy(start), list(batches))
    assert expected[0]["0.weight"] is None and expected[1]["0.weight"] is not None
    for actual in run_ranks(2, worker):
        for step in range(4):
            assert_same(actual[step], expected[step])


@pytest.mark.filterwarnings("ignore:Batch norm statistics that differ")
def test_lazy_modules_materialise_with_rank_0s_values(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2), nn.LazyBatchNorm1d())
        exchange = attach(model, comm, policy)
        model(torch.randn(3, 5)).square().sum().backward()
        assert exchange.num_exchanges == 1
        return states(model), gradients(model)

    (first, first_gradients), *others = run_ranks(3, worker)
    for other, other_gradients in others:
        assert_same(
            {n: other[n] for n in other if "running" not in n},
            {n: first[n] for n in first if "running" not in n},
            rtol=0,
        )
        assert_same(other_gradients, first_gradients, rtol=0)


def test_a_removed_module_is_unhooked(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        exchange = attach(model, comm, policy)
        removed = model.pop(4)
        model(torch.ones(1, 5)).sum().backward()
        assert exchange.num_exchanges == 1
        assert not removed.weight._post_accumulate_grad_hooks
        if comm.rank == 0:  # alone
            removed(torch.ones(1, 3)).sum().backward()
        assert exchange.num_exchanges == 1

    run_ranks(2, worker)


def test_a_late_parameter_used_without_forward_names_the_cure(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator, cured: bool) -> Tensor:
        model = mlp()
        exchange = attach(model, comm, policy)
        model.add_module("head", nn.Linear(1, 1))
        if cured:
            exchange.sync_parameters()
        hidden = torch.full((1, 5), float(comm.rank))
        for name in "01234":
            hidden = getattr(model, name)(hidden)
        model.head(hidden).sum().backward()
        return model.head.weight.grad

    with pytest.raises(
        UsageError, match=r"Parameter `head.weight` joined.*`exchange.sync_parameters\(\)`"
    ):
        run_ranks(2, lambda comm: worker(comm, False))
    first, second = run_ranks(2, lambda comm: worker(comm, True))
    assert torch.equal(first, second)


@pytest.mark.parametrize("rank_0_adds", [True, False])
def test_models_that_change_differently_are_an_error(
    rank_0_adds: bool, policy: ExchangePolicy
) -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        attach(model, comm, policy)
        if comm.rank == 1:
            model.append(nn.Linear(1, 1))
        elif rank_0_adds:
            model.append(nn.Linear(1, 2))
        words = r"`5.weight` is \(2, 1\)" if rank_0_adds else "rank 1 wants: take up new parameters"
        with pytest.raises(DisagreementError, match=words):
            model(torch.ones(1, 5)).sum().backward()

    run_ranks(2, worker)


def test_an_exchange_that_failed_is_collected_without_waiting_for_its_pending_calls() -> None:
    """A backend's group waits for them when it goes, and the whole process with it."""
    is_collected = threading.Event()

    def fail(comm: Communicator) -> object:
        model = mlp()
        exchange = attach(model, comm, Synchronous(algorithm="native", bucket_bytes=1))
        if comm.rank == 1:
            model.append(nn.Linear(1, 1))
        try:
            model(torch.ones(1, 5)).sum().backward()
        except DisagreementError:
            return exchange if comm.rank == 1 else None
        raise AssertionError("no disagreement")

    def worker(comm: Communicator) -> float:
        start_s = time.monotonic()
        kept = fail(comm)  # rank 1's end of the group stays open meanwhile
        if comm.rank == 1:
            is_collected.wait(20)
        gc.collect()
        is_collected.set()
        del kept
        return time.monotonic() - start_s

    assert max(run_ranks(2, worker, timeout_s=60)) < 30


def test_has_changed_notices_every_kind_of_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    parameters = ParameterSet(model)

    def changed() -> bool:
        has_changed = parameters.has_changed()
        parameters.refresh()
        return has_changed

    assert not changed()
    model.append(nn.ReLU())
    assert changed()
    del model[2]
    assert changed()
    model[1][0] = nn.Linear(2, 2)
    assert changed()
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert changed()
    model[0].bias = None
    assert changed()
    model[0].register_parameter("extra", nn.Parameter(torch.zeros(1)))
    assert changed()
    model[0].requires_grad_(False)
    assert changed()
    with torch.no_grad():
        model[0].weight.add_(1)
    model(torch.ones(1, 2)).sum().backward()
    model.to(torch.float32)
    assert not changed()


def test_names_that_move_lose_no_gradient(policy: ExchangePolicy) -> None:
    def worker(comm: Communicator) -> float:
        model = nn.Sequential(nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        exchange = attach(model, comm, policy)
        with exchange.no_sync():
            model(torch.full((1, 1), float(comm.rank))).sum().backward()
        model.insert(0, nn.Identity())
        model(torch.full((1, 1), 2.0 * comm.rank)).sum().backward()
        return model[1].weight.grad.item()

    assert run_ranks(3, worker) == [3.0, 3.0, 3.0]


def test_a_functional_call_leaves_its_tensors_alone(policy: ExchangePolicy) -> None:
    """`torch.func.functional_call` lends the model other tensors for one forward."""

    def worker(comm: Communicator) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        attach(model, comm, policy)
        own = torch.full((1, 1), 1.0 + comm.rank, requires_grad=True)
        x = torch.ones(1, 1)
        values = [functional_call(model, {"weight": own}, x).item(), own.item()]
        adapted = model.weight + own  # MAML: the gradient flows back to the model's parameter
        functional_call(model, {"weight": adapted}, x).mul(1 + comm.rank).sum().backward()
        return [*values, model.weight.grad.item()]

    assert run_ranks(2, worker) == [[1.0, 1.0, 1.5], [2.0, 2.0, 1.5]]
