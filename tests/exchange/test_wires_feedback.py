"""Error feedback: the accumulated error is one residual, however many steps it took."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.exchange import Exchange, Synchronous, attach, make_policy
from allstep.exchange.overlapped import OverlappedExchange
from allstep.exchange.wires import Int8, PowerSGD, TopK, WireFormat
from allstep.exchange.wires.base import WireState
from tests.exchange.wiring import bucket, exchange
from tests.helpers.ranks import run_ranks

LOSSY: dict[str, WireFormat] = {
    "int8": Int8(block=16),
    "powersgd": PowerSGD(rank=2),
    "topk": TopK(fraction=0.1),
}
SIZE, NUM_STEPS = 2, 200


def steps_of_gradients() -> list[Tensor]:
    """A part that stays, which a format without memory misses every time, and noise."""
    generator = torch.Generator().manual_seed(1)
    n = bucket().num_elements
    constant = torch.randn(SIZE, n, generator=generator) * torch.logspace(-2, 0, n)
    noise = 0.001 * torch.randn(NUM_STEPS, SIZE, n, generator=generator)
    return list((constant + noise).to(torch.float64))


def accumulated_errors(wire: WireFormat, steps: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """[NUM_STEPS, num_elements]: sums of the errors so far; and the workers' residuals together."""
    workers = exchange(wire, bucket(torch.float64), steps, lambda state, _: state.residual)
    errors = torch.stack([r - g.mean(0) for r, g in zip(workers[0][0], steps, strict=True)])
    residuals = [residual for _, residual in workers]
    unsent = None if residuals[0] is None else torch.stack(residuals).sum(0)
    return errors.cumsum(0), unsent


@pytest.mark.parametrize("name", LOSSY)
def test_accumulated_error_stays_bounded_over_200_steps(name: str) -> None:
    wire, steps = LOSSY[name], steps_of_gradients()
    accumulated, residual = accumulated_errors(wire, steps)
    norms = accumulated.norm(dim=1)
    assert norms[100:].max() < 1.3 * norms[:100].max()
    # What was not sent yet explains all of it.
    torch.testing.assert_close(accumulated[-1], -residual, rtol=0, atol=1e-11)

    forgetful, _ = accumulated_errors(replace(wire, error_feedback=False), steps)
    drift = forgetful.norm(dim=1)
    assert drift[-1] > 1.8 * drift[99]
    assert drift[-1] > 1.6 * norms.max()


@pytest.mark.parametrize("name", LOSSY)
def test_new_state_has_nothing_to_send(name: str) -> None:
    state = LOSSY[name].new_state(bucket(torch.bfloat16, num_tail=5))
    assert isinstance(state, WireState)
    assert state.residual.shape == (bucket().num_elements,)
    assert state.residual.dtype == torch.float32
    assert not state.residual.any()
    assert replace(LOSSY[name], error_feedback=False).new_state(bucket()).residual is None


class Turns(nn.Module):
    """Two parameters, each the gradient of what its turn is given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size, 8)) for _ in range(2)])

    def forward(self, turn: int, gradient: Tensor) -> Tensor:
        return (self.parts[turn] * gradient).sum()


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("name", LOSSY)
def test_residual_ignores_an_unused_earlier_gradient(name: str, staleness: int) -> None:
    """As the discriminator's is in the generator's turn, of which only `zero_grad` is left out."""
    drawn = torch.randn(40, SIZE, 4, 8)

    def worker(comm: Communicator) -> tuple[Tensor, Tensor]:
        model, received = Turns(4), torch.zeros(2, 4, 8)
        policy = make_policy(compression=LOSSY[name], staleness=staleness, algorithm="native")
        exchange = attach(model, comm, policy)

        def receive() -> None:
            for part, total in zip(model.parts, received, strict=True):
                total += 0 if part.grad is None else part.grad
                part.grad = None

        for step, gradients in enumerate(drawn):
            turn = step % 2
            model.parts[turn].grad = None
            if step >= 2 and not staleness:
                model.parts[1 - turn].grad = 100 * drawn[step - 1][comm.rank]  # nobody's by now
            model(turn, gradients[comm.rank]).backward()
            if not staleness:
                received[turn] += model.parts[turn].grad
            else:
                receive()
        for _ in exchange.flush():
            receive()
        model.zero_grad()
        return received, unsent(exchange, model)

    means = drawn.mean(1)
    expected = torch.stack([means[0::2].sum(0), means[1::2].sum(0)])
    (received, residual), *others = run_ranks(SIZE, worker)
    residual = torch.stack([residual, *(other for _, other in others)]).sum(0)
    torch.testing.assert_close(received + residual, expected)
    assert differs_by(received, expected) > 1e-3  # so the residual is what explains it


@pytest.mark.parametrize("idle", range(3))
def test_int8_owner_without_gradients_sends_its_rounding(idle: int) -> None:
    """The owner of a part rounds the mean, also where all gradients are the other workers'."""
    drawn = torch.randn(3, 40, 8)
    drawn[idle] = 0

    def worker(comm: Communicator) -> tuple[float, float]:
        model, received, errors = Turns(40), torch.zeros(40, 8), []
        attach(model, comm, Synchronous(compression=Int8(block=32), algorithm="native"))
        for step in range(1, 101):
            model.zero_grad()
            model(int(comm.rank == idle), drawn[comm.rank]).backward()
            received += model.parts[0].grad
            errors.append(differs_by(received, step * drawn.mean(0)))
        return max(errors[:20]), max(errors)

    for early, all_along in run_ranks(3, worker):
        assert 0 < all_along < 2 * early


@pytest.mark.parametrize("name", LOSSY)
def test_one_worker_gets_residuals_of_two(name: str) -> None:
    gradients = torch.randn(SIZE, 4, 8)
    policy = Synchronous(compression=LOSSY[name], algorithm="native")

    def train(
        comm: Communicator, num_steps: int, state: dict[str, Any] | None
    ) -> tuple[Tensor, dict[str, Any]]:
        model, received = Turns(4), torch.zeros(4, 8)
        exchange = attach(model, comm, policy)
        if state is not None:
            exchange.load_state_dict(state)
            state = exchange.state_dict()  # a checkpoint before the first gradient keeps it
            exchange.load_state_dict(state)
        for _ in range(num_steps):
            model.zero_grad()
            model(0, gradients[comm.rank] if comm.size > 1 else gradients.mean(0)).backward()
            received += model.parts[0].grad
        return received, exchange.state_dict()

    before, state = run_ranks(SIZE, lambda comm: train(comm, 5, None))[0]
    after, at_end = train(Communicator.single_process(), 3, state)
    torch.testing.assert_close(before + after, 8 * gradients.mean(0), rtol=1e-6, atol=1e-6)
    without, _ = train(Communicator.single_process(), 3, None)
    assert differs_by(before + without, 8 * gradients.mean(0)) > 1e-3
    again, _ = train(Communicator.single_process(), 3, at_end)
    torch.testing.assert_close(again, without)  # and once only


def unsent(exchange: Exchange, model: Turns) -> Tensor:
    """[2, 4, 8]: what this worker has not sent of its gradients."""
    assert isinstance(exchange, OverlappedExchange)
    residuals = exchange.unsent()
    return torch.stack([residuals[f"parts.{i}"].view(4, 8).clone() for i in range(2)])


def differs_by(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max())
