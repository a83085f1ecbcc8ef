"""The plain exchange, the reference for all others."""

from collections.abc import Mapping
from itertools import compress
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from allstep.comm.agreement import Details, digest
from allstep.exchange.agreement import CURE, agree
from allstep.exchange.exchange import Exchange
from allstep.exchange.parameters import sparse_gradient_message
from allstep.exchange.policy import ExchangeStats


class PlainExchange(Exchange):
    """Makes one all-reduce per tensor, at the end of the backward pass.

    grad = sum_r scale * grad_r

    with `batch.scale`, which is 1/size for a mean. A missing gradient counts as zero. If no worker
    has a gradient for a parameter, its `p.grad` is not changed. Sums of weighted losses are divided
    by the weights' total. One message is sent before the all-reduces, with the workers' comparison
    and notes.
    """

    _cure = CURE
    _sent_bytes = 0
    _exchange_s = 0.0

    def stats(self) -> ExchangeStats:
        seconds, completed = self._exchange_s, self._num_completed
        return ExchangeStats(self.num_exchanges, self._sent_bytes, seconds, seconds, completed)

    def _reduce(self) -> Mapping[str, nn.Parameter]:
        start_s = perf_counter()
        trained = self._parameters.trained
        for name, p in trained.items():
            if p.grad is not None and p.grad.layout != torch.strided:
                self._stop_all(sparse_gradient_message(name))
        names, divisor = self._agree_on_gradients()
        summed = {name: p for name, p in trained.items() if name in names}
        gradients = tuple(map(_gradient, summed.values()))
        if gradients:
            torch._foreach_mul_(gradients, self.batch.scale)
            self.comm.all_reduce(gradients)
        payload_bytes = sum(gradient.nbytes for gradient in gradients)
        self._sent_bytes += 2 * (self.comm.size - 1) * payload_bytes // self.comm.size
        self._sum_others()
        self._exchange_s += perf_counter() - start_s
        self._divide_sums(summed.values(), divisor)
        return summed

    def _sum_others(self) -> None:
        """Sums the gradients of divided parameters over their copies, if there are any."""
        self._divided.sum_copies({})

    def _agree_on_gradients(self) -> tuple[set[str], Tensor | None]:
        """The parameters that any worker has a new gradient for, and the divisor of sums."""
        state = self._next_state(self.comm.device)
        compared = (*self._calls, *(state.entries() if state else ()))
        has_new, note = self._has_new_gradient(), self.batch.note()
        told = agree(
            self.comm,
            self._describe(),
            (*self._signature, *compared),
            details_digest=digest((self._digest, compared)),
            told=note + np.packbits(np.array([*has_new.values()], bool)).tobytes(),
            cure=self._cure,
        )
        divisor = self.batch.divisor_told([each[: len(note)] for each in told])
        bits = [np.frombuffer(each, np.uint8, offset=len(note)) for each in told]
        has_any = np.unpackbits(np.bitwise_or.reduce(bits), count=len(has_new)).astype(bool)
        return set(compress(has_new, has_any)), divisor

    @property
    def _calls(self) -> Details:
        """This worker's calls in the passes of the global batch, if they must be equal."""
        return ()

    def _has_new_gradient(self) -> dict[str, bool]:
        """name -> whether this worker has a gradient for it that the others have not seen."""
        trained = self._parameters.trained.items()
        return {name: name in self._touched and p.grad is not None for name, p in trained}


def _gradient(p: nn.Parameter) -> Tensor:
    """A view of `p.grad`, outside of the graph that `backward(create_graph=True)` leaves."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad.detach()
