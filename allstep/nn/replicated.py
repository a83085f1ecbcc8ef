"""Parameters that all workers of a grid have, each seeing a part of the array."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from allstep.comm import Communicator
from allstep.comm.autograd import all_reduce

__all__ = ["replicated"]


def replicated(comm: Communicator, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same parameters, whose gradient is the sum over the workers.

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
        pairs = zip(grads, needed, strict=True)
        return None, *(all_reduce(ctx.comm, grad) if need else None for grad, need in pairs)
