"""What an earlier exchange has left in `p.grad`, where the next one is a sum."""

from collections.abc import Iterable

import torch
from torch import nn

from allstep.exchange.parameters import ParameterSet


class CarryOver:
    """Lets what `p.grad` holds before a sum of gradients count once, not once a worker.

    A mean keeps what is the same on all workers; a sum multiplies it by their number. So before
    gradients that will be summed are added to `p.grad`, it is divided by that number: it is then
    this worker's part of the sum, as the gradients are. A parameter that no worker has a gradient
    for gets back what it had.

    Args:
        parameters: whose `p.grad` it is.
        size: the number of workers.
    """

    def __init__(self, parameters: ParameterSet, size: int) -> None:
        self._parameters = parameters
        self._size = size
        self._carried: dict[int, nn.Parameter] = {}  # whose `p.grad` is a part of a sum by now

    @torch.no_grad()
    def carry(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Before gradients are added to `p.grad`, or it is summed; all that was not yet if None."""
        trained = self._parameters.trained.values() if parameters is None else parameters
        new = {id(p): p for p in trained if id(p) not in self._carried}
        gradients = [p.grad for p in new.values() if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, self._size)
        self._carried |= new

    @torch.no_grad()
    def finish(self, summed: Iterable[nn.Parameter]) -> None:
        """After the sum of some parameters' gradients: the others are again as they were."""
        if not self._carried:
            return
        is_summed = set(map(id, summed))
        for number, p in self._carried.items():
            if number not in is_summed and p.grad is not None:
                p.grad.mul_(self._size)
        self._carried.clear()
