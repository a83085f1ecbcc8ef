"""On a GPU: multi-tensor and fused kernels against the plain way on the CPU, and CUDA graphs."""

import pytest
import torch
from torch import nn

from allstep.optim import LAMB, LARS
from tests.helpers.compare import largest_difference
from tests.optim.table import OPTIMIZERS, Make, gradients, parameters, train

pytestmark = pytest.mark.gpu


def on_gpu(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(parameter.detach().cuda()) for parameter in params]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_gpu_is_cpu(make: Make) -> None:
    here, there = parameters(), on_gpu(parameters())
    oracle, optimizer = make(here, weight_decay=0.1), make(there, weight_decay=0.1)
    expected = train(oracle, here, 20)
    for step in range(20):
        for parameter, gradient in zip(there, gradients(step), strict=True):
            parameter.grad = gradient.cuda()
        optimizer.step()
    assert largest_difference([p.detach().cpu() for p in there], expected) < 1e-12


@pytest.mark.parametrize("make", [LAMB, LARS])
def test_steps_can_be_captured(make: type[LAMB] | type[LARS]) -> None:
    here, there = parameters(), on_gpu(parameters())
    options = {"weight_decay": 0.1, "nonfinite": "propagate"}
    oracle = make(here, 0.01, **options)
    lr = torch.tensor(0.01, dtype=torch.float64, device="cuda")
    optimizer = make(there, lr, capturable=True, **options)
    for parameter in there:
        parameter.grad = torch.zeros_like(parameter)

    def load(step: int) -> None:
        for parameter, gradient in zip(there, gradients(step), strict=True):
            parameter.grad.copy_(gradient)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        load(0)
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 5):
        load(step)
        graph.replay()
    expected = train(oracle, here, 5)
    assert largest_difference([p.detach().cpu() for p in there], expected) < 1e-12
