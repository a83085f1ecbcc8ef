"""Parameters that are equal on all workers: their initial values and their gradients."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.comm import Communicator
from allstep.comm.autograd import all_reduce
from allstep.device import drawn_seed


def replicated(comm: Communicator, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The parameters, with gradients that are summed over the workers.

    Each worker sees a part of the array, so its own gradient is a part of the whole. With this
    the gradient is whole on every worker, and equal parameters stay equal.

    Args:
        comm: the workers; all of them must call this, and have equal parameters.
        parameters: some may be None.

    Returns:
        Tensors of the same values, to compute with in place of the parameters; None where one is.
    """
    if comm.size == 1:
        return list(parameters)
    given = [parameter for parameter in parameters if parameter is not None]
    summed = iter(_Replicated.apply(comm, *given))  # type: ignore[no-untyped-call]
    return [None if parameter is None else next(summed) for parameter in parameters]


class _Replicated(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        sent = [grad for grad, need in zip(grads, needed, strict=True) if need]
        summed = all_reduce(ctx.comm, torch.cat([grad.reshape(-1) for grad in sent]))
        parts = zip(sent, torch.split(summed, [grad.numel() for grad in sent]), strict=True)
        found = iter([part.view_as(grad).to(grad.dtype) for grad, part in parts])
        return None, *(next(found) if need else None for need in needed)


def agreed_seed(comm: Communicator, seed: int | None) -> int:
    """The same seed on all workers: rank 0's, which is drawn from torch's generator if None."""
    drawn = drawn_seed() if seed is None else seed
    agreed: int = comm.broadcast_object(drawn)
    return agreed


def generator_at(seed: int, *position: int) -> torch.Generator:
    """A generator for the initial values at one position of the whole array."""
    return torch.Generator().manual_seed(seed_at(seed, position))


def seed_at(seed: int, place: object) -> int:
    """A seed of 63 bits that depends on a seed and on `place`, which is plain data.

    >>> seed_at(0, "encoder") == seed_at(0, "decoder")
    False
    """
    digest = blake2b(repr((seed, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
