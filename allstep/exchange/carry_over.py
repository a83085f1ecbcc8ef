"""What an earlier exchange has left in `p.grad`, where the next one would count it again."""

from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import Tensor, nn

from allstep.exchange.divided import DividedParameters
from allstep.exchange.global_batch import BatchSum
from allstep.exchange.parameters import ParameterSet


class CarryOver:
    """Lets what `p.grad` holds before an exchange count once, not once a worker.

    A mean keeps what is the same on all workers; a sum multiplies it by their number. So before
    gradients that will be summed are added to `p.grad`, it is divided by that number: it is then
    this worker's part of the sum, as the gradients are. A parameter that no worker has a gradient
    for gets back what it had.

    Or it is held out of the exchange and added to what that leaves; it must be the same on all
    workers. Exact sums are of what was rounded; a late gradient that was not used yet must not be
    sent again, to come later still.

    Args:
        parameters: whose `p.grad` it is.
        divided: likewise, if it is held.
        batch: tells whether gradients are summed.
        size: the number of workers.
        holds: whether what `carry` finds now is to be held.
    """

    def __init__(
        self,
        parameters: ParameterSet,
        divided: DividedParameters,
        batch: BatchSum,
        size: int,
        holds: Callable[[], bool],
    ) -> None:
        self._parameters, self._divided = parameters, divided
        self._batch, self._size, self._holds = batch, size, holds
        self._carried: dict[int, nn.Parameter] = {}  # whose `p.grad` is a part of a sum by now
        self._seen: set[int] = set()  # ids of those whose `p.grad` is of the next exchange by now
        self._held: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def carry(self, names: Iterable[str] | None = None) -> None:
        """Before gradients are added to `p.grad`, or it is summed; all that was not yet if None."""
        trained = self._parameters.trained
        found = trained if names is None else {name: trained[name] for name in names}
        if self._holds():
            self.hold({**found, **self._divided.by_name} if names is None else found)
        elif self._size > 1 and self._batch.scale == 1:
            self._divide(found.values())

    def carry_one(self, name: str, _: Tensor | None) -> None:
        """Before a gradient is added to one parameter's."""
        self.carry([name])

    @torch.no_grad()
    def _divide(self, parameters: Iterable[nn.Parameter]) -> None:
        new = {id(p): p for p in parameters if id(p) not in self._carried}
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

    @torch.no_grad()
    def hold(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Before gradients are added to the `p.grad` of some parameters."""
        for name, p in parameters.items():
            if id(p) not in self._seen and p.grad is not None:
                self._held[name] = p, p.grad.detach().clone()
                p.grad = None
            self._seen.add(id(p))

    @torch.no_grad()
    def give_back(self) -> None:
        """After the exchange; what is left is added to what that has left."""
        for p, held in self._held.values():
            p.grad = held if p.grad is None else p.grad.add_(held)
        self._held.clear()
        self._seen.clear()

    def in_words(self, names: Container[str]) -> str:
        """What will be added to some parameters' gradients, for a comparison of the workers."""
        return "".join(
            f", added to a gradient of `{name}` whose sum is {float(x.double().sum()):.17g}"
            for name, (_, x) in self._held.items()
            if name in names
        )
