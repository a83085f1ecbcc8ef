"""Replaces random numbers of torch, Python and numpy by constants."""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CONSTANT = 0.5
_FUNCTIONS = [
    *((random, name) for name in ("random", "uniform", "gauss", "normalvariate", "triangular")),
    *(
        (np.random, name)
        for name in ("rand", "randn", "random", "random_sample", "uniform", "normal")
    ),
]


def _made_constant(draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(draw)
    def constant(*args: Any, **kwargs: Any) -> Any:
        drawn = draw(*args, **kwargs)
        return np.full_like(drawn, _CONSTANT) if isinstance(drawn, np.ndarray) else _CONSTANT

    return constant


# Made once, so that several threads may replace and restore them in any order.
_DRAWN = [(module, name, getattr(module, name)) for module, name in _FUNCTIONS]
_MADE_CONSTANT = [(module, name, _made_constant(draw)) for module, name, draw in _DRAWN]


class ConstantRandomNumbers(TorchDispatchMode):
    """A mode in which random functions return constants; for torch's operators on this thread.

    Whole numbers stay random, for they choose samples; but a single one is more likely the
    place of a crop. numpy's generator objects can't be reached.
    """

    def __enter__(self) -> "ConstantRandomNumbers":
        for module, name, constant in _MADE_CONSTANT:
            setattr(module, name, constant)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        for module, name, draw in _DRAWN:
            setattr(module, name, draw)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call: Callable[[], Any] = partial(func, *args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return call()
        name = func.name()
        if name.startswith("aten::native_dropout"):
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        drawn = call()
        if not isinstance(drawn, Tensor):
            return drawn
        if drawn.is_floating_point():
            return drawn.fill_(1.0 if "bernoulli" in name else _CONSTANT)
        if name.startswith("aten::randint") and drawn.numel() == 1:
            return drawn.zero_()
        return drawn
