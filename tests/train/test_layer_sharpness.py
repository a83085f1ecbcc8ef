"""Each layer's curvature against the blocks of a tiny net's dense Hessian, on any workers."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allstep import Communicator
from allstep.train.layer_sharpness import rank_correlation
from allstep.train.sharpness import Sharpness, sharpness
from tests.helpers.ranks import run_ranks
from tests.train.test_sharpness import NET, batch_for, loss_of, make_samples

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def measure(comm: Communicator) -> Sharpness:
    net, batch = copy.deepcopy(NET), batch_for(comm, make_samples())
    options: dict[str, Any] = {"max_products": 3000, "tolerance": 1e-9}
    return sharpness(net, loss_of, batch, comm, layers=True, **options)


@pytest.fixture(scope="module")
def alone() -> Sharpness:
    return measure(Communicator.single_process())


def loss_in(name: str) -> Any:
    """The loss over all samples in eval mode as a function of one parameter, flat."""
    net, data = copy.deepcopy(NET).eval().requires_grad_(False), make_samples().tensors
    shape = net.get_parameter(name).shape

    def loss(value: Tensor) -> Tensor:
        output = torch.func.functional_call(net, {name: value.view(shape)}, (data[0],))
        return nn.functional.cross_entropy(output, data[1])

    return loss


def test_layers_are_the_hessians_blocks(alone: Sharpness) -> None:
    assert [layer.name for layer in alone.layers] == [name for name, _ in NET.named_parameters()]
    for layer in alone.layers:
        weight = NET.get_parameter(layer.name).detach().flatten()
        loss = loss_in(layer.name)
        block = torch.func.hessian(loss)(weight)
        gradient = torch.func.grad(loss)(weight)
        assert layer.top_eigenvalue == pytest.approx(
            float(torch.linalg.eigvalsh(block)[-1]), rel=1e-6
        )
        assert layer.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-9)
        assert layer.lars_ratio == pytest.approx(float(weight.norm() / gradient.norm()), rel=1e-9)
        assert layer.lamb_ratio == pytest.approx(
            float(weight.norm() / gradient.sign().norm()), rel=1e-9
        )
        density = gradient.abs().sum() ** 2 / (len(gradient) * gradient.square().sum())
        assert layer.gradient_density == pytest.approx(float(density), rel=1e-9)
        # The whole Hessian's is another one.
        assert layer.top_eigenvalue < 0.999 * alone.top_eigenvalue


def test_noise_is_that_of_micro_batches(alone: Sharpness) -> None:
    net, of_samples = copy.deepcopy(NET).eval(), []
    for micro_batch in batch_for(Communicator.single_process(), make_samples()).micro_batches:
        gradients = torch.autograd.grad(loss_of(net, micro_batch.data), list(net.parameters()))
        of_samples += [gradients] * micro_batch.num_samples  # each as that of its micro-batch
    for layer, of_layer in zip(alone.layers, zip(*of_samples, strict=True), strict=True):
        variance = torch.stack(of_layer).var(0, correction=0)
        assert layer.gradient_noise == pytest.approx(math.sqrt(float(variance.sum())), rel=1e-9)


@pytest.mark.parametrize("num_workers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_layers_are_the_same_on_any_workers(num_workers: int, alone: Sharpness) -> None:
    for found in run_ranks(num_workers, measure):
        for layer, expected in zip(found.layers, alone.layers, strict=True):
            assert layer.top_eigenvalue == pytest.approx(expected.top_eigenvalue, rel=1e-6)
            assert layer.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-10)
            assert layer.gradient_noise == pytest.approx(expected.gradient_noise, rel=1e-10)


def test_layers_without_a_gradient() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.used

    comm = Communicator.single_process()
    found = sharpness(
        Net(),
        lambda model, data: model(data[0]).square().mean(),
        batch_for(comm, make_samples()),
        comm,
        layers=True,
    )
    _, unused = found.layers
    assert unused.top_eigenvalue == unused.gradient_norm == 0
    assert math.isnan(unused.lars_ratio) and math.isnan(unused.gradient_density)


def test_rank_correlation_against_its_formula() -> None:
    """1 - 6 sum(d^2) / (n (n^2 - 1)) without equal numbers."""
    generator = torch.Generator().manual_seed(2)
    one, other = torch.randperm(9, generator=generator), torch.randperm(9, generator=generator)
    pairs = [(float(a) ** 3, math.exp(float(b))) for a, b in zip(one, other, strict=True)]
    expected = 1 - 6 * float((one - other).square().sum()) / (9 * 80)
    assert rank_correlation(pairs) == pytest.approx(expected, abs=1e-11)
    assert rank_correlation([(a, -b) for a, b in pairs]) == pytest.approx(-expected, abs=1e-11)
    tied = [(1.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 3.0)]  # ranks .5 .5 2 3 and 0 1 2.5 2.5
    assert rank_correlation(tied) == pytest.approx(8 / 9, abs=1e-11)
    assert math.isnan(rank_correlation([(1.0, 2.0), (2.0, 1.0)]))
