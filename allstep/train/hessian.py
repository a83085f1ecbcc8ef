"""Products with a loss's Hessian; refuses functions that torch would differentiate wrongly."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from allstep.errors import AllstepError

# The code object that every backward has that is decorated with torch's `once_differentiable`.
_ONCE_DIFFERENTIABLE = once_differentiable(lambda *_: None).__code__


def hessian_product(
    loss: Tensor, parameters: list[nn.Parameter], pieces: list[Tensor]
) -> Sequence[Tensor | None]:
    """The Hessian of a loss times a vector.

    Args:
        loss: a scalar, with its graph.
        parameters: the parameters that the loss is a function of.
        pieces: the vector's pieces, in the parameters' shapes.

    Returns:
        The product's pieces; None stands for zeros.

    Raises:
        AllstepError: if torch has no second derivative of the loss.
    """
    _refuse_once_differentiable(loss)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    for gradient in gradients:
        if gradient is not None and gradient.layout != torch.strided:
            raise _no_second_derivative("of an embedding with `sparse=True`")
    slope = sum(
        ((g * v).sum() for g, v in zip(gradients, pieces, strict=True) if g is not None),
        start=torch.zeros((), device=loss.device, dtype=loss.dtype),
    )
    if not slope.requires_grad:  # the loss is linear in the weights
        return [None] * len(parameters)
    try:
        return torch.autograd.grad(slope, parameters, allow_unused=True)
    except RuntimeError as error:
        if "derivative for" in str(error) or "differentiate twice" in str(error):
            raise _no_second_derivative(f"({error})") from None
        raise


def _refuse_once_differentiable(loss: Tensor) -> None:
    """Raises if a once-differentiable function ends the loss: torch takes its slope as constant."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        function: Any = getattr(node, "_forward_cls", None)  # of an autograd.Function
        backward = getattr(function, "backward", None)
        if getattr(backward, "__code__", None) is _ONCE_DIFFERENTIABLE:
            raise _no_second_derivative(f"of `{function.__name__}`, which is once_differentiable")


def _no_second_derivative(what: str) -> AllstepError:
    return AllstepError(
        f"The loss must be twice differentiable, but torch knows no second derivative {what};"
        " put plain operations in its place."
    )
