"""The plain exchange: the specification of all others, and their oracle."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from allstep.exchange.exchange import Exchange

__all__ = ["PlainExchange"]


class PlainExchange(Exchange):
    """One all-reduce a tensor, at the end of the backward pass.

    grad = 1/size * sum_r grad_r, where a worker without a gradient counts as zero. A parameter
    that no worker has a gradient for keeps `p.grad` as it is.
    """

    def _reduce(self, parameters: Sequence[nn.Parameter]) -> int:
        gradients = tuple(_gradient(p) for p in parameters)
        if gradients:
            self.comm.all_reduce(gradients, "mean")
        return sum(gradient.nbytes for gradient in gradients)


def _gradient(p: nn.Parameter) -> Tensor:
    """A view of `p.grad`, outside of the graph that `backward(create_graph=True)` leaves."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad.detach()
