"""What an earlier exchange has left in `p.grad`, where the next one is a sum."""

from collections.abc import Collection, Iterable

import torch

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
        self._carried: set[str] = set()  # parameters whose `p.grad` is a part of a sum by now

    @torch.no_grad()
    def carry(self, names: Iterable[str] | None = None) -> None:
        """Before gradients are added to `p.grad`, or it is summed; all that was not yet if None."""
        trained = self._parameters.trained
        new = (trained.keys() if names is None else set(names)) - self._carried
        gradients = [p.grad for name in new if (p := trained[name]).grad is not None]
        if gradients:
            torch._foreach_div_(gradients, self._size)
        self._carried |= new

    @torch.no_grad()
    def finish(self, summed: Collection[str]) -> None:
        """After the sum of some parameters' gradients: the others are again as they were."""
        for name in self._carried.difference(summed):
            p = self._parameters.trained.get(name)
            if p is not None and p.grad is not None:
                p.grad.mul_(self._size)
        self._carried.clear()
