"""What a lossy format did not send this time is added to what it sends next time.

[Note: error feedback] A worker's format sends S(v) in place of v = gradient + residual, and the
new residual is v - S(v). Summed over T steps,

    sum of what was sent = sum of gradients - residual

so the accumulated error is one residual, however large T is, where without feedback T errors
add up. It also holds for the sum over workers: what is missing from it is the sum of the
residuals, whoever keeps them.

A gradient that isn't finite never enters a residual, from which it would never leave again.

Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al.,
"Error feedback fixes SignSGD", ICML 2019, arXiv:1901.09847, algorithm 2.
"""

import torch
from torch import Tensor

from allstep.device import is_accelerator
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires.base import WireState


def working_dtype(layout: BucketLayout) -> torch.dtype:
    """What lossy formats compute in: at least float32."""
    return torch.promote_types(layout.flat_dtype, torch.float32)


def new_residual(layout: BucketLayout) -> Tensor:
    """Everything has been sent."""
    return torch.zeros(layout.num_elements, dtype=working_dtype(layout), device=layout.device)


def with_residual(flat: Tensor, layout: BucketLayout, state: WireState) -> Tensor:
    """What this worker wants to send: gradients and residual, in a new tensor.

    Args:
        flat: [num_elements + num_tail].
        layout: the bucket's.
        state: the bucket's.

    Returns:
        [num_elements] of `working_dtype(layout)`.
    """
    gradients = flat[: layout.num_elements]
    if state.residual is None:
        return gradients.to(working_dtype(layout), copy=True)
    return gradients + state.residual


def send_to_nobody(flat: Tensor, layout: BucketLayout, state: WireState) -> None:
    """The sum of a lone worker, with what was not sent when there were others.

    Args:
        flat: [num_elements + num_tail]; overwritten.
        layout: the bucket's.
        state: the bucket's; nothing is left unsent.
    """
    if state.residual is not None:
        flat[: layout.num_elements] += state.residual
        state.residual.zero_()


def keep_unsent(state: WireState, unsent: Tensor) -> None:
    """Makes `unsent` the residual; where it isn't finite the old one stays.

    Args:
        state: the bucket's.
        unsent: [num_elements].
    """
    if state.residual is None:
        return
    # If the sum is finite all are; several times faster, but the host looks at it.
    if not is_accelerator(unsent.device) and unsent.sum().isfinite():
        state.residual.copy_(unsent)
    else:
        torch.where(unsent.isfinite(), unsent, state.residual, out=state.residual)
