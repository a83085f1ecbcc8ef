"""The plain exchange: the specification of all others, and their oracle."""

from collections.abc import Mapping
from time import perf_counter

import torch
from torch import Tensor, nn

from allstep.comm.agreement import digest
from allstep.exchange.agreement import agree
from allstep.exchange.exchange import Exchange
from allstep.exchange.parameters import sparse_gradient_message
from allstep.exchange.policy import ExchangeStats


class PlainExchange(Exchange):
    """One all-reduce a tensor, at the end of the backward pass.

    grad = sum_r scale * grad_r

    with `batch.scale`, which is 1/size for a mean. A worker without a gradient counts as zero.
    A parameter that no worker has a gradient for keeps `p.grad` as it is. Sums of losses with
    weights are divided by the weights' total, which is one more all-reduce.
    """

    _sent_bytes = 0
    _exchange_s = 0.0

    def stats(self) -> ExchangeStats:
        return ExchangeStats(
            self.num_exchanges, self._sent_bytes, self._exchange_s, self._exchange_s
        )

    def _reduce(self) -> Mapping[str, nn.Parameter]:
        start_s = perf_counter()
        trained = self._parameters.trained
        for name, p in trained.items():
            if p.grad is not None and p.grad.layout != torch.strided:
                self._stop_all(sparse_gradient_message(name))
        names = self._agree_on_parameters()
        gradients = tuple(_gradient(trained[name]) for name in names)
        if gradients:
            torch._foreach_mul_(gradients, self.batch.scale)
            self.comm.all_reduce(gradients)
        payload_bytes = sum(gradient.nbytes for gradient in gradients)
        self._sent_bytes += 2 * (self.comm.size - 1) * payload_bytes // self.comm.size
        self._sum_divided()
        self._exchange_s += perf_counter() - start_s
        self._divide_sums((trained[name] for name in names), self.batch.agree_on_divisor())
        return {name: trained[name] for name in names}

    def _sum_divided(self) -> None:
        """Of parameters that only this worker has, and maybe copies."""
        self._divided.sum_copies({})

    def _agree_on_parameters(self) -> list[str]:
        """The parameters that any worker has a new gradient for, in the model's order."""
        trained = self._parameters.trained
        touched = [name in self._touched and p.grad is not None for name, p in trained.items()]
        state = self._next_state(self.comm.device)
        compared = state.entries() if state else ()
        if not agree(
            self.comm,
            "exchange gradients",
            (*self._signature, *compared),
            details_digest=digest((self._digest, compared)),
            optional=touched,
        ):
            flags = torch.tensor(touched, dtype=torch.int32, device=self.comm.device)
            touched = [flag > 0 for flag in self.comm.all_reduce(flags, "max").tolist()]
        return [name for name, is_touched in zip(trained, touched, strict=True) if is_touched]


def _gradient(p: nn.Parameter) -> Tensor:
    """A view of `p.grad`, outside of the graph that `backward(create_graph=True)` leaves."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad.detach()
