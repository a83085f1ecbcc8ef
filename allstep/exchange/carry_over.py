"""Gradients that an earlier exchange has left in `p.grad`, which the next would count again."""

from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import Tensor, nn

from allstep.exchange.divided import DividedParameters
from allstep.exchange.global_batch import BatchSum
from allstep.exchange.parameters import ParameterSet


class CarryOver:
    """Lets what `p.grad` holds before an exchange count once, not once a worker.

    A mean preserves a value that is the same on all workers; a sum multiplies it by their number.
    So before gradients that will be summed are added to `p.grad`, it is divided by that number:
    like these gradients, it is then this worker's part of the sum. If no worker has a gradient for
    a parameter, its `p.grad` is restored.

    Alternatively `p.grad` is held out of the exchange, and added to the result; it must be the same
    on all workers. This is for exact sums, which take rounded gradients only, and for staleness: a
    late gradient that was not used yet must not be sent, and delayed, again.

    Args:
        parameters: the parameters that are exchanged.
        divided: divided parameters, whose `p.grad` may be held, too.
        batch: knows whether gradients are summed.
        size: the number of workers.
        holds: whether the gradients that `carry` finds now are to be held.
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
        """Called before `p.grad` is added to, or summed; None means all parameters."""
        trained = self._parameters.trained
        found = trained if names is None else {name: trained[name] for name in names}
        if self._holds():
            self.hold({**found, **self._divided.by_name} if names is None else found)
        elif self._size > 1 and self._batch.scale == 1:
            self._divide(found.values())

    def carry_one(self, name: str, _: Tensor | None) -> None:
        """Called before a gradient is added to one parameter's `p.grad`."""
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
        """Called after some parameters' gradients were summed; restores the others' `p.grad`."""
        if not self._carried:
            return
        is_summed = set(map(id, summed))
        for number, p in self._carried.items():
            if number not in is_summed and p.grad is not None:
                p.grad.mul_(self._size)
        self._carried.clear()

    @torch.no_grad()
    def hold(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Holds some parameters' `p.grad`, before gradients are added to it."""
        for name, p in parameters.items():
            if id(p) not in self._seen and p.grad is not None:
                self._held[name] = p, p.grad.detach().clone()
                p.grad = None
            self._seen.add(id(p))

    @torch.no_grad()
    def give_back(self) -> None:
        """Adds the held gradients to the results of the exchange."""
        for p, held in self._held.values():
            p.grad = held if p.grad is None else p.grad.add_(held)
        self._held.clear()
        self._seen.clear()

    def in_words(self, names: Container[str]) -> str:
        """The held gradients of some parameters, in words, for a comparison of the workers."""
        return "".join(
            f", added to a gradient of `{name}` whose sum is {float(x.double().sum()):.17g}"
            for name, (_, x) in self._held.items()
            if name in names
        )
