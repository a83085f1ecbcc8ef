"""A model that changes between steps, against a written reference in one process."""

import copy
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator, Stale, Synchronous
from allstep.exchange import ExchangePolicy
from tests.exchange.nets import mlp
from tests.helpers.ranks import run_ranks

NUM_STEPS, GLOBAL_BATCH = 6, 8
SIZES = (1, 2, 5)  # a global batch has four micro-batches: of five workers one has none
POLICIES: dict[str, ExchangePolicy] = {
    "synchronous": Synchronous(algorithm="native"),
    "plain": Synchronous(plain=True, reduction="sum"),
    "exact": Synchronous(algorithm="native", compression="exact"),
    "stale": Stale(steps=2, algorithm="native"),
    "stale and exact": Stale(algorithm="native", compression="exact"),
}


@cache
def start_and_others() -> tuple[nn.Sequential, nn.Linear, nn.Linear]:
    return mlp(), nn.Linear(1, 1), nn.Linear(5, 7)


@cache
def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    num_samples = NUM_STEPS * GLOBAL_BATCH
    return torch.randn(num_samples, 5, generator=generator), torch.ones(num_samples, 1)


def freeze_for(steps: range) -> Callable[[nn.Sequential, int], None]:
    return lambda model, step: model[0].requires_grad_(step not in steps) and None


def append(model: nn.Sequential, step: int) -> None:
    if step in (0, 2):
        model.append(copy.deepcopy(start_and_others()[1]))


def replace(model: nn.Sequential, step: int) -> None:
    if step in (0, 3):
        model[0] = copy.deepcopy(start_and_others()[2])


def insert(model: nn.Sequential, step: int) -> None:
    if step == 2:
        model.insert(0, nn.Tanh())  # names move


def reparametrize(model: nn.Sequential, step: int) -> None:
    if step == 2:
        weight_norm(model[0])  # one of the new parameters lies in the old one's memory


CHANGES: dict[str, Callable[[nn.Sequential, int], None]] = {
    "frozen": freeze_for(range(2, 9)),
    "frozen before the first step": freeze_for(range(9)),
    "frozen for a step": freeze_for(range(2, 3)),
    "appended": append,
    "replaced": replace,
    "names move": insert,
    "reparametrized": reparametrize,
}


def apply(model: nn.Module, gradients: dict[nn.Parameter, Tensor]) -> None:
    with torch.no_grad():
        for p, gradient in gradients.items():
            p.sub_(gradient, alpha=0.1)


def reference(change: Callable[..., None], staleness: int, *, drops: bool = True) -> list[Tensor]:
    """Whole batches in one process; what is frozen or gone gets no gradient made before."""
    model = copy.deepcopy(start_and_others()[0])
    x, y = samples()
    made: deque[dict[nn.Parameter, Tensor]] = deque()
    for step, at in enumerate(range(0, len(x), GLOBAL_BATCH)):
        change(model, step)
        trained = [p for p in model.parameters() if p.requires_grad]
        loss = (model(x[at : at + GLOBAL_BATCH]) - y[at : at + GLOBAL_BATCH]).square().mean()
        made.append(dict(zip(trained, torch.autograd.grad(loss, trained), strict=True)))
        if drops:
            made = deque({p: g for p, g in each.items() if p in set(trained)} for each in made)
        if len(made) > staleness:
            apply(model, made.popleft())
    for gradients in made:
        apply(model, gradients)
    return list(model.parameters())


def train(
    comm: Communicator,
    policy: ExchangePolicy,
    change: Callable[..., None],
    state: dict[str, Any] | None = None,
    end: int = NUM_STEPS,
) -> dict[str, Any]:
    """From the start, or from a state, until the step `end`."""
    model = copy.deepcopy(start_and_others()[0])
    loader = allstep.data.loader(
        TensorDataset(*samples()), comm, global_batch=GLOBAL_BATCH, micro_batch=2, shuffle=False
    )
    for step in range(state["end"] if state else 0):
        change(model, step)
    exchange = allstep.attach(model, comm, policy)
    if state:
        model.load_state_dict(state["model"])
        exchange.load_state_dict(state["exchange"])
        loader.load_state_dict(state["loader"])

    def update() -> None:
        apply(model, {p: p.grad for p in model.parameters() if p.grad is not None})
        model.zero_grad()

    for batch in allstep.steps(loader, exchange):
        change(model, batch.step)
        for x, y in batch:
            batch.backward((model(x) - y).square().mean())
        if exchange.has_gradients:
            update()
        if batch.step + 1 == end:
            break
    if end == NUM_STEPS:
        for _ in exchange.flush():
            update()
    parts = {"model": model, "exchange": exchange, "loader": loader}
    saved = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    return {**saved, "end": end, "parameters": list(model.parameters())}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changing_model_is_the_same_on_any_number_of_workers(
    change: Callable[..., None], policy: ExchangePolicy
) -> None:
    expected = reference(change, policy.staleness)
    for size in SIZES:
        for found in run_ranks(size, lambda comm: train(comm, policy, change)["parameters"]):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_the_control_applies_gradients_that_were_made_before_the_freeze() -> None:
    for name in ("frozen", "frozen for a step"):
        change = CHANGES[name]
        pairs = zip(reference(change, 1, drops=False), reference(change, 1), strict=True)
        assert max(float((a - b).detach().abs().max()) for a, b in pairs) > 1e-4


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 5)])
@pytest.mark.parametrize("name", ["stale", "stale and exact"])
@pytest.mark.parametrize("change", ["frozen for a step", "names move"])
def test_a_changed_model_goes_on_from_a_checkpoint(
    change: str, name: str, sizes: tuple[int, int]
) -> None:
    """Gradients in flight find their parameters, or are dropped, as in a run without a stop."""
    policy, changes = POLICIES[name], CHANGES[change]
    state = run_ranks(sizes[0], lambda comm: train(comm, policy, changes, end=3))[0]
    expected = reference(changes, policy.staleness)

    def resume(comm: Communicator) -> list[Tensor]:
        return train(comm, policy, changes, copy.deepcopy(state))["parameters"]

    for found in run_ranks(sizes[1], resume):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_what_starts_to_be_trained_gets_the_first_workers_values() -> None:
    """It may have been changed while it was frozen; what stays frozen is left alone."""
    initial = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))

    def work(comm: Communicator) -> list[float]:
        model = copy.deepcopy(initial)
        model[:2].requires_grad_(False)
        allstep.attach(model, comm)
        with torch.no_grad():
            for layer in model[:2]:
                layer.bias.fill_(comm.rank)
        model[1].requires_grad_(True)
        model(torch.ones(1, 1))
        return [layer.bias.item() for layer in model[:2]]

    assert run_ranks(2, work) == [[0, 0], [1, 0]]
