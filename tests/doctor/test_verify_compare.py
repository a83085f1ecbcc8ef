"""What is rounding between two runs, and what is a divergence."""

import math

import pytest
import torch
from torch import nn

from allstep.doctor import RunRecord
from allstep.doctor.verify.compare import find_divergence, limit_of, noise_tensors, nonfinite_step
from tests.doctor.trainings import runs_with, train_once


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def test_noise_tensors_are_the_biases_of_keys_only():
    """Their gradient is rounding, beside those of queries and values in one tensor."""
    torch.manual_seed(0)
    model = Attention()
    nn.init.normal_(model.attention.in_proj_bias)
    run = RunRecord([train_once(model, torch.randn(8, 5, 24))])
    left_out = noise_tensors(run, 0, limit_of(run, run))
    assert left_out == {"attention.in_proj_bias[24:36]", "attention.in_proj_bias[36:48]"}
    assert "attention.in_proj_bias[60:72]" in run.first.steps[0].parameters


def test_only_more_than_rounding_is_a_divergence():
    x = torch.randn(2, 1000)
    for scale, diverges in ((1e-6, False), (1e-5, False), (1e-2, True), (1.0, True)):
        for gradient in (True, False):
            one, other = runs_with(x, x * (1 + scale * torch.randn(2, 1000)), gradient=gradient)
            assert (find_divergence(one, other) is not None) == diverges


def test_divergence_names_the_first_tensor():
    x = torch.randn(2, 1000)
    y = x.clone()
    y[1] *= 1.1
    divergence = find_divergence(*runs_with(x, y, gradient=True))
    assert (divergence.step, divergence.quantity, divergence.name) == (0, "gradient", "b")
    assert divergence.difference == pytest.approx(0.1 / 1.1, rel=0.5)


def test_a_gradient_that_is_only_rounding_is_no_divergence():
    x, y = torch.randn(2, 1000), torch.randn(2, 1000)
    y[0] = x[0]
    x[1] *= 1e-8
    y[1] *= 1e-8
    assert find_divergence(*runs_with(x, y, gradient=True)) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("gradient", [True, False])
def test_finite_in_only_one_run_is_a_divergence(bad, gradient):
    x = torch.ones(2, 3)
    y = x.clone()
    y[1, 1] = bad
    for runs in (runs_with(x, y, gradient=gradient), runs_with(y, x, gradient=gradient)):
        divergence = find_divergence(*runs)
        assert (divergence.name, divergence.difference) == ("b", math.inf)
        assert nonfinite_step(*runs) is None


def test_a_gradient_that_overflows_in_both_runs_is_no_divergence():
    """As with a gradient scaler, which then leaves the step out."""
    x = torch.tensor([[1.0, 2.0], [math.inf, math.nan]])
    runs = runs_with(x, x, gradient=True)
    assert nonfinite_step(*runs) is None
    assert find_divergence(*runs) is None
    y = x.clone()
    y[0] = 3.0  # the other tensor is compared all the same
    assert find_divergence(*runs_with(x, y, gradient=True)).name == "a"
