"""The plain exchange: the specification of all others, and their oracle."""

from collections.abc import Sequence

import torch
from torch import nn

from allstep.exchange.exchange import Exchange

__all__ = ["PlainExchange"]


class PlainExchange(Exchange):
    """One all-reduce a tensor, at the end of the backward pass.

    grad = 1/size * sum_r grad_r, where a worker without a gradient counts as zero. A parameter
    that no worker has a gradient for keeps `p.grad` as it is.
    """

    def _reduce(self, parameters: Sequence[nn.Parameter]) -> int:
        sent_bytes = 0
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            self.comm.all_reduce(p.grad.detach(), "mean")
            sent_bytes += p.grad.nbytes
        return sent_bytes
