"""Away from the CPU a step neither reads a number, which would stop a GPU, nor mixes devices.

Tensors without data, on the device "meta", can be neither read nor mixed with those of another.
"""

from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.table import OPTIMIZERS, SHAPES


def without_data(dtype: torch.dtype) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in SHAPES]
    for parameter in params:
        parameter.grad = torch.empty_like(parameter)
    return params


# torch's fused AdamW, which groups that do not adapt are moved by, has no such kernel for a tensor.
WITH_TENSOR_RATE = [name for name in OPTIMIZERS if name != "lamb {'fused': True}"]
CASES = [*((name, False) for name in OPTIMIZERS), *((name, True) for name in WITH_TENSOR_RATE)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "has_tensor_rate"), CASES)
def test_a_step_stays_on_its_device(name: str, dtype: torch.dtype, has_tensor_rate: bool) -> None:
    params = without_data(dtype)
    lr: Any = torch.tensor(0.1, device="meta") if has_tensor_rate else 0.1
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "adapt": False}]
    optimizer = OPTIMIZERS[name](groups, lr, nonfinite="propagate")
    for _ in range(2):
        optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert {value.device.type for value in [*params, *kept]} == {"meta"}
