"""Error feedback: the error of a lossy format's last message is added to its next one.

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

from abc import abstractmethod

import torch
from torch import Tensor

from allstep.device import is_accelerator
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires.base import Transport, WireFormat, WireState


class LossyFormat(WireFormat):
    """A format that keeps the unsent rest as a residual, unless error feedback is off.

    Attributes:
        error_feedback: whether it does.
    """

    error_feedback: bool

    def new_state(self, layout: BucketLayout) -> WireState:
        """See `WireFormat`."""
        if not self.error_feedback:
            return WireState()
        dtype = working_dtype(layout)
        return WireState(torch.zeros(layout.num_elements, dtype=dtype, device=layout.device))

    def sum_(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        """Makes `flat` the sum over the workers; see `WireFormat`."""
        if transport.size > 1:
            self._sum(flat, layout, state, transport)
        elif state.residual is not None:  # what was not sent when there were others
            flat[: layout.num_elements] += state.residual
            state.residual.zero_()

    @abstractmethod
    def _sum(
        self, flat: Tensor, layout: BucketLayout, state: WireState, transport: Transport
    ) -> None:
        """`sum_` over several workers."""


def keeps_unsent(wire: WireFormat) -> bool:
    """Whether a format keeps residuals."""
    return isinstance(wire, LossyFormat) and wire.error_feedback


def working_dtype(layout: BucketLayout) -> torch.dtype:
    """The dtype in which lossy formats compute: at least float32."""
    return torch.promote_types(layout.flat_dtype, torch.float32)


def with_residual(flat: Tensor, layout: BucketLayout, state: WireState) -> Tensor:
    """Gradients plus residual, in a new tensor.

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


def keep_unsent(state: WireState, unsent: Tensor) -> None:
    """Makes `unsent` the residual; elements that aren't finite keep the old one.

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
