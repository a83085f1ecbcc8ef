"""How many kernels a step launches away from the CPU, counted on tensors without data."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from allstep.optim import LAMB, LARS


class Launches(TorchDispatchMode):
    """Counts operators, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def bert_large() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Its parameters with weight decay and without: 335 M elements in 391."""
    matrices = [(30522, 1024), (512, 1024), (2, 1024), (1024, 1024)]
    matrices += 24 * [*4 * [(1024, 1024)], (4096, 1024), (1024, 4096)]
    vectors = [(30522,), *3 * [(1024,)], *24 * [*9 * [(1024,)], (4096,)]]
    decayed, others = (
        [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        for shapes in (matrices, vectors)
    )
    for p in [*decayed, *others]:
        p.grad = torch.empty_like(p)
    return decayed, others


@pytest.mark.parametrize(("kind", "most"), [(LAMB, 29), (LARS, 40)])
def test_a_step_of_bert_large_launches_few_kernels(kind: type[Any], most: int) -> None:
    decayed, others = bert_large()
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "adapt": False}]
    optimizer = kind(groups, 0.1, nonfinite="propagate")
    optimizer.step()
    with Launches() as launches:
        optimizer.step()
    assert launches.count <= most
