"""Error feedback: the accumulated error is one residual, however many steps it took."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from allstep.exchange.wires import Int8, PowerSGD, TopK, WireFormat
from allstep.exchange.wires.base import WireState
from tests.exchange.wiring import bucket, exchange

LOSSY: dict[str, WireFormat] = {
    "int8": Int8(block=16),
    "powersgd": PowerSGD(rank=2),
    "topk": TopK(fraction=0.1),
}
SIZE, NUM_STEPS = 2, 500


def steps_of_gradients() -> list[Tensor]:
    """A part that stays, which a format without memory misses every time, and noise."""
    generator = torch.Generator().manual_seed(1)
    n = bucket().num_elements
    constant = torch.randn(SIZE, n, generator=generator) * torch.logspace(-2, 0, n)
    noise = 0.001 * torch.randn(NUM_STEPS, SIZE, n, generator=generator)
    return list((constant + noise).to(torch.float64))


def accumulated_errors(wire: WireFormat, steps: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """[NUM_STEPS, num_elements]: sums of the errors so far; and the mean residual at the end."""
    workers = exchange(wire, bucket(torch.float64), steps, lambda state, _: state.residual)
    errors = torch.stack([r - g.mean(0) for r, g in zip(workers[0][0], steps, strict=True)])
    residuals = [residual for _, residual in workers]
    mean_residual = None if residuals[0] is None else torch.stack(residuals).mean(0)
    return errors.cumsum(0), mean_residual


@pytest.mark.parametrize("name", LOSSY)
def test_accumulated_error_stays_bounded_over_500_steps(name: str) -> None:
    wire, steps = LOSSY[name], steps_of_gradients()
    accumulated, residual = accumulated_errors(wire, steps)
    norms = accumulated.norm(dim=1)
    assert norms[250:].max() < 1.3 * norms[:250].max()
    # What was not sent yet explains all of it.
    torch.testing.assert_close(accumulated[-1], -residual, rtol=0, atol=1e-11)

    forgetful, _ = accumulated_errors(replace(wire, error_feedback=False), steps[:200])
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
