"""Gradients some steps old, against a written reference in one process."""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.errors import CheckpointError, CommunicationError
from allstep.exchange import ExchangePolicy, Stale, attach, make_policy
from allstep.exchange.wires import Int8
from tests.exchange.nets import mlp, shard
from tests.helpers.ranks import run_ranks

NUM_STEPS = 9
RATES = [0.1 / (1 + step) for step in range(NUM_STEPS)]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
}


def late(staleness: int, **kwargs: Any) -> ExchangePolicy:
    return make_policy(algorithm="native", staleness=staleness, bucket_bytes=64, **kwargs)


def reference(start: nn.Module, batches: Tensor, staleness: int, kind: str) -> list[Tensor]:
    """theta_{t+1} = update(theta_t, gradient of step t - staleness, that step's rate)."""
    model = copy.deepcopy(start)
    optimizer = OPTIMIZERS[kind](model.parameters())
    made: list[tuple[Tensor, ...]] = []

    def update(step: int) -> None:
        for p, gradient in zip(model.parameters(), made[step], strict=True):
            p.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = RATES[step]
        optimizer.step()

    for step, batch in enumerate(batches):
        loss = model(batch).square().mean()
        made.append(torch.autograd.grad(loss, list(model.parameters())))
        if step >= staleness:
            update(step - staleness)
    for step in range(max(0, len(batches) - staleness), len(batches)):
        update(step)
    return list(model.parameters())


def largest_difference(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(some, others, strict=True))


class Late:
    """A training with an attached model, one step at a time."""

    def __init__(self, start: nn.Module, comm: Communicator, staleness: int, kind: str, **kw: Any):
        self.model = copy.deepcopy(start).to(comm.device)
        self.comm, self.staleness = comm, staleness
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.exchange = attach(self.model, comm, late(staleness, **kw))

    def step(self, number: int, batch: Tensor) -> None:
        self.model(shard(batch, self.comm).to(self.comm.device)).square().mean().backward()
        if self.exchange.has_gradients:
            self.update(number - self.staleness)
        else:
            assert all(p.grad is None for p in self.model.parameters())
            assert not self.optimizer.state
        self.optimizer.zero_grad()

    def update(self, made_at: int) -> None:
        self.optimizer.param_groups[0]["lr"] = RATES[made_at]
        self.optimizer.step()

    def flush(self) -> None:
        for made_at in self.exchange.flush():
            self.update(made_at)
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        parts = (self.model, self.optimizer, self.exchange)
        return copy.deepcopy({type(part).__name__: part.state_dict() for part in parts})

    def load(self, state: dict[str, Any]) -> None:
        for part in (self.model, self.optimizer, self.exchange):
            part.load_state_dict(state[type(part).__name__])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stale_training_equals_the_reference(kind: str, staleness: int, size: int) -> None:
    start, batches = mlp(), torch.randn(NUM_STEPS, 12, 5)

    def worker(comm: Communicator) -> list[Tensor]:
        training = Late(start, comm, staleness, kind)
        for number, batch in enumerate(batches):
            training.step(number, batch)
        training.flush()
        assert not list(training.exchange.flush())
        return list(training.model.parameters())

    expected = reference(start, batches, staleness, kind)
    fresh = reference(start, batches, 0, kind)
    assert (
        max(float((a - b).detach().abs().max()) for a, b in zip(expected, fresh, strict=True))
        > 1e-6
    )
    for found in run_ranks(size, worker):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wire", ["fp32", "exact"])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 2)])
def test_checkpoint_keeps_gradients_in_flight(sizes: tuple[int, int], wire: Any) -> None:
    start, batches = mlp(), torch.randn(NUM_STEPS, 12, 5)

    def until_the_middle(comm: Communicator) -> dict[str, Any]:
        training = Late(start, comm, 2, "adamw", compression=wire)
        for number, batch in enumerate(batches[:5]):
            training.step(number, batch)
        return training.state()

    state = run_ranks(sizes[0], until_the_middle)[0]
    assert len(state["OverlappedExchange"]["in_flight"]) == 2

    def from_the_middle(comm: Communicator) -> list[Tensor]:
        training = Late(mlp(), comm, 2, "adamw", compression=wire)
        training.load(copy.deepcopy(state))
        for number, batch in enumerate(batches[5:], start=5):
            training.step(number, batch)
        training.flush()
        return list(training.model.parameters())

    expected = reference(start, batches, 2, "adamw")
    for found in run_ranks(sizes[1], from_the_middle):  # Adam divides by gradients near zero
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_checkpoint_of_other_parameters_is_refused() -> None:
    def worker(comm: Communicator) -> None:
        state = attach(mlp(), comm, late(1)).state_dict()
        with pytest.raises(CheckpointError, match="other parameters"):
            attach(nn.Linear(2, 2), comm, late(1)).load_state_dict(state)

    run_ranks(2, worker)


@pytest.mark.parametrize(
    ("saved", "loaded", "words"),
    [
        (late(1), late(0), r"`staleness` \(=0\) was 1 in the checkpoint"),
        (
            late(1, compression="exact"),
            late(1),
            r"`compression` \(=FullPrecision\(\)\) was Exact\(\)",
        ),
        (
            late(1, compression=Int8(64)),
            late(1, compression=Int8(32)),
            r"Int8\(block=32, .* was Int8\(block=64",
        ),
        (late(1), late(1, reduction="sum"), r"`reduction` \(='sum'\) was 'mean' in the checkpoin"),
    ],
)
def test_a_checkpoint_of_another_policy_is_refused(
    saved: ExchangePolicy, loaded: ExchangePolicy, words: str
) -> None:
    def worker(comm: Communicator) -> None:
        model = mlp()
        exchange = attach(model, comm, saved)
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
        state = exchange.state_dict()
        exchange.detach()
        with pytest.raises(CheckpointError, match=words + ".*attach with the .* or start the"):
            attach(model, comm, loaded).load_state_dict(state)
        del state["policy"]
        with pytest.raises(CheckpointError, match="is missing in the checkpoint"):
            attach(mlp(), comm, saved).load_state_dict(state)

    for size in (1, 2):
        run_ranks(size, worker)


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_state_dict_after_a_failed_exchange_raises(algorithm: str) -> None:
    """What is in flight would be this worker's own gradients, not the means."""

    def worker(comm: Communicator) -> None:
        model = nn.Linear(2, 1, bias=False)
        exchange = attach(model, comm, Stale(steps=2, algorithm=algorithm))
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
        exchange.state_dict()
        if comm.rank == 1:
            comm.abort()
            return
        with suppress(CommunicationError):
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(CommunicationError):
            exchange.state_dict()
        exchange.detach()

    run_ranks(2, worker, timeout_s=20)


def scaled_run(
    start: nn.Module, comm: Communicator, batches: Tensor, knows: bool, wire: str = "fp32"
) -> list[Tensor]:
    """SGD one step late with a scaler whose scale grows and falls."""
    model = copy.deepcopy(start).to(comm.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(comm.device.type, init_scale=8.0, growth_interval=2)
    exchange = attach(model, comm, late(1, compression=wire), scaler=scaler if knows else None)
    for number, batch in enumerate(batches):
        loss = model(shard(batch, comm).to(comm.device)).square().mean()
        if number == 4:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if exchange.has_gradients:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    for _ in exchange.flush():
        scaler.step(optimizer)
        scaler.update()
    return list(model.parameters())


@pytest.mark.parametrize("wire", ["fp32", "exact"])
def test_grad_scaler_with_stale_gradients(wire: str) -> None:
    start, batches = mlp(), torch.randn(NUM_STEPS, 12, 5)
    model = copy.deepcopy(start)
    made: list[tuple[Tensor, ...]] = []
    for number, batch in enumerate(batches):
        made.append(torch.autograd.grad(model(batch).square().mean(), list(model.parameters())))
        if number >= 1 and number - 1 != 4:
            with torch.no_grad():
                for p, gradient in zip(model.parameters(), made[number - 1], strict=True):
                    p -= 0.1 * gradient
    with torch.no_grad():
        for p, gradient in zip(model.parameters(), made[-1], strict=True):
            p -= 0.1 * gradient
    expected = list(model.parameters())
    for found in run_ranks(2, lambda comm: scaled_run(start, comm, batches, True, wire)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    naive = run_ranks(2, lambda comm: scaled_run(start, comm, batches, False))[0]
    assert (
        max(float((a - b).detach().abs().max()) for a, b in zip(naive, expected, strict=True))
        > 1e-3
    )


def test_stale_gradient_of_a_layer_frozen_since() -> None:
    policy = Stale(steps=2)

    def train(comm: Communicator) -> dict[str, Any]:
        net = mlp()
        exchange = attach(net, comm, policy)
        for step in range(3):
            net.zero_grad()
            net(torch.ones(2, 5)).sum().backward()
            if step == 1:
                net[0].requires_grad_(False)
        return exchange.state_dict()

    state = run_ranks(2, train)[0]
    assert [list(step["sums"]) for step in state["in_flight"]] == [
        ["2.weight", "2.bias", "4.weight", "4.bias"]
    ] * 2

    def resume(comm: Communicator) -> None:
        net = mlp()
        net[0].requires_grad_(False)
        exchange = attach(net, comm, policy)
        exchange.load_state_dict(state)
        net(torch.ones(2, 5)).sum().backward()
        assert net[0].weight.grad is None
        assert torch.equal(net[2].weight.grad, state["in_flight"][0]["sums"]["2.weight"])

    run_ranks(2, resume, timeout_s=20)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("kwargs", [{}, {"reduction": "sum"}], ids=["mean", "sum"])
def test_late_gradients_of_two_batches_make_one_update(
    size: int, staleness: int, kwargs: dict[str, Any]
) -> None:
    """What was not used yet stays in `p.grad`; sent again, it would come later still."""
    torch.manual_seed(0)
    start, batches = mlp().double(), torch.randn(NUM_STEPS, 4, 5, dtype=torch.float64)
    share = 1 / size if kwargs else 1

    def worker(comm: Communicator) -> list[Tensor]:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        attach(model, comm, late(staleness, **kwargs))
        for step, batch in enumerate(batches):
            (share * model(shard(batch, comm)).square().mean()).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    def expected(*, is_every_one_used: bool) -> list[Tensor]:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made: list[tuple[Tensor, ...]] = []
        for step, batch in enumerate(batches):
            loss = model(batch).square().mean()
            made.append(torch.autograd.grad(loss, list(model.parameters())))
            if step >= staleness and (step % 2 or is_every_one_used):
                for p, gradient in zip(model.parameters(), made[step - staleness], strict=True):
                    p.grad = gradient.clone() if p.grad is None else p.grad + gradient
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    for found in run_ranks(size, worker):
        assert largest_difference(found, expected(is_every_one_used=True)) < 1e-12
        assert largest_difference(found, expected(is_every_one_used=False)) > 1e-3
