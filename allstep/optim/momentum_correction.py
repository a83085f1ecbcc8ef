"""Correction of a momentum that contains the learning rate, when the rate changes.

Source: Goyal et al., 2017, arXiv:1706.02677, remark 2.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from allstep.torch_classes import local_part


def factor(group: Mapping[str, Any]) -> float | Tensor:
    """The factor of the momentum after a change of the rate: lr / previous lr."""
    previous, lr = group["previous_lr"], group["lr"]
    if not group["momentum_correction"] or previous is None:
        return 1.0
    if isinstance(previous, Tensor):
        return torch.where(previous > 0, lr / previous, 1.0).reshape(())
    # After a rate of 0 the corrected momentum is 0 and stays so.
    ratio: float | Tensor = lr / previous if previous else 1.0
    return ratio.reshape(()) if isinstance(ratio, Tensor) else ratio


def end_step(group: dict[str, Any], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Corrects the momentum of parameters without a gradient, and remembers the rate.

    The rate stays in the same memory: a CUDA graph looks where it was when it was captured.
    """
    if not group["momentum_correction"]:
        return
    correction = factor(group)
    if isinstance(correction, Tensor) or correction != 1.0:
        for parameter in group["params"]:
            state = states.get(parameter)
            if parameter.grad is None and state:
                local_part(state["momentum_buffer"]).mul_(correction)
    lr, previous = group["lr"], group["previous_lr"]
    if isinstance(previous, Tensor):
        previous.copy_(torch.as_tensor(lr).reshape(previous.shape))
    else:
        group["previous_lr"] = lr.clone() if isinstance(lr, Tensor) else lr
