"""Runs a training in float64, whatever its dtype, so that rounding is tiny."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_COARSE = (torch.float32, torch.float16, torch.bfloat16)
_TO_COARSE = (Tensor.float, Tensor.half, Tensor.bfloat16)
_BY_IDENTITY = (torch.autograd.grad, torch.autograd.backward)


class Float64(TorchFunctionMode):
    """A mode in which operations with a float64 tensor compute in float64, on this thread.

    Parameters that were made float64 make everything so that follows from them: other arguments
    are converted, and what would convert back does nothing. Random numbers and data keep their
    values. Autocast leaves float64 as it is.

    >>> linear = nn.Linear(2, 1)
    >>> make_float64(linear)
    >>> with Float64():
    ...     nn.functional.mse_loss(linear(torch.ones(3, 2)).float(), torch.zeros(3, 1)).dtype
    torch.float64
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BY_IDENTITY or not _has_float64(pytree.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func in _TO_COARSE:
            return args[0]
        num_kept = 1 if _writes(func) else 0
        kept, others = args[:num_kept], args[num_kept:]
        out = {key: value for key, value in kwargs.items() if key == "out"}
        converted, named = pytree.tree_map(_converted, (tuple(others), dict(kwargs)))
        return func(*kept, *converted, **{**named, **out})


def make_float64(model: nn.Module) -> None:
    """Makes the parameters and buffers float64, in place; inputs follow in every forward."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_lazy(tensor) and tensor.dtype in _COARSE:
                tensor.data = tensor.data.double()
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(_convert_inputs, with_kwargs=True)


def _convert_inputs(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Converts inputs of modules that check dtypes themselves, such as `nn.LSTM`."""
    return pytree.tree_map_only(Tensor, _converted, (args, kwargs))


def _has_float64(leaves: Iterable[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in leaves)


def _converted(leaf: Any) -> Any:
    if isinstance(leaf, torch.dtype):
        return torch.float64 if leaf in _COARSE else leaf
    is_coarse = isinstance(leaf, Tensor) and leaf.dtype in _COARSE
    return leaf.double() if is_coarse else leaf


def _writes(func: Any) -> bool:
    """Whether an operation writes to its first argument: `add_`, `__iadd__`, `__setitem__`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__set__", "__setitem__") or name.startswith("__i")
    return name.endswith("_")
