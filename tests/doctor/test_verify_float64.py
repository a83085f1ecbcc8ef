"""A training in float64, whatever it is written in."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allstep
from allstep import Communicator
from allstep.doctor.verify.float64 import Float64, make_float64
from allstep.doctor.verify.recorder import Recorder


class Mixed(nn.Module):
    """Makes float32 itself: a first state, a constant, a conversion."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        state = torch.zeros(1, len(x), 4)
        hidden = self.rnn(self.embedding(x), state)[0][:, -1]
        kept = torch.zeros(len(x), 4)
        kept[:, :2] = hidden[:, :2]
        kept += 0.5
        return self.out(self.norm(hidden) + kept).float()


@pytest.mark.parametrize("has_autocast", [False, True])
def test_float64_reaches_every_gradient(has_autocast):
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
    make_float64(model)
    x = torch.randint(5, (3, 7))
    with Float64(), torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
        out = model(x)
        loss = F.mse_loss(out, torch.ones(3, 2)) + F.binary_cross_entropy(
            out.sigmoid(), torch.ones(3, 2)
        )
        loss.backward()
    optimizer.step()
    assert loss.dtype == torch.float64
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_float64_gradients_are_closer_than_float32_ones():
    """The oracle is the same model made in float64 from the beginning."""

    def gradient(dtype: torch.dtype, *, converts: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype)
        x = torch.randn(64, 8).to(torch.float32 if converts else dtype)
        if converts:
            make_float64(model)
        with Float64() if converts else contextlib.nullcontext():
            F.mse_loss(model(x), torch.zeros(64, 1, dtype=x.dtype)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).double()

    torch.manual_seed(0)
    converted = gradient(torch.float32, converts=True)
    plain = gradient(torch.float32, converts=False)
    assert 1e-9 < (plain - converted).norm() / converted.norm() < 1e-5  # the control
    again = gradient(torch.float32, converts=True)
    assert torch.equal(converted, again)


def test_float64_leaves_gradients_of_inputs_to_their_tensors():
    """As with a gradient penalty, whose inputs are found by identity."""
    model = nn.Linear(3, 1)
    make_float64(model)
    x = torch.ones(2, 3, requires_grad=True)
    with Float64():
        (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.allclose(found, model.weight.float().expand(2, 3))


def test_recorder_without_float32_has_the_limit_of_float64_and_ends():
    model = nn.Linear(2, 2)
    recorder = Recorder(0, 1, lambda: None, ["float32"])
    recorder.attach(allstep.attach, model, Communicator.single_process())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    torch.optim.SGD(model.parameters()).step()
    recorder.close()
    assert recorder.record.epsilon == 2.0**-52
    assert (torch.ones(1) + torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert F.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype == torch.float32
    with pytest.raises(RuntimeError):  # the mode has ended
        F.linear(torch.ones(1, 2), model.weight)
