"""A random state for each thread, since torch's default generator belongs to the process.

A mode belongs to a thread: these pass the thread's own generator to what draws random numbers, so
that what a rank draws depends on its seed and not on which thread draws first.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_own = threading.local()

_DRAWING = {
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
    *(torch.bernoulli, torch.multinomial, torch.poisson),
    *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.normal_, Tensor.uniform_),
    *(Tensor.random_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_),
    # Functions of Python that a mode sees in place of what they call.
    *(init.uniform_, init.normal_, init.kaiming_uniform_),
}


class RankGenerator(TorchFunctionMode):
    """Within it, calls that draw use this thread's generator; a cheap mode for every rank.

    It does not see what operators draw inside, such as dropout: `ThreadGenerator` does.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        seed_this_thread(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWING and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": _own.generator}
        elif func is torch.randn_like:
            return torch.empty_like(*args, **kwargs).normal_(generator=_own.generator)
        elif func is torch.rand_like:
            return torch.empty_like(*args, **kwargs).uniform_(generator=_own.generator)
        return func(*args, **kwargs)


@cache
def _takes_generator(func: Any) -> bool:
    """Of an operator, whose schema takes as long to read as some operators run."""
    return any(argument.name == "generator" for argument in func._schema.arguments)


class ThreadGenerator(TorchDispatchMode):
    """Within it, this thread's operators draw from this thread's generator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled; asked at each operator, it takes longer than most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.native_dropout.default:
            raise NotImplementedError("native_dropout takes no generator; use processes")
        if _takes_generator(func) and kwargs.get("generator") is None:
            kwargs["generator"] = _own.generator
        return func(*args, **kwargs)


_seed_process = torch.manual_seed


def manual_seed(seed: int) -> torch.Generator:
    """Stands in for torch's: a rank that is a thread seeds its own generator, not the others'."""
    if threading.current_thread() is threading.main_thread() or not hasattr(_own, "generator"):
        return _seed_process(seed)
    generator: torch.Generator = _own.generator
    return generator.manual_seed(seed)


def seed_this_thread(seed: int, device: object = None) -> None:
    """Stands in for `seed_all` where ranks are threads."""
    _own.generator = torch.Generator().manual_seed(seed)


@contextmanager
def seeded_thread(seed: int, device: torch.device) -> Iterator[None]:
    """Stands in for `allstep.nn.chain.seeded` where ranks are threads."""
    before = _own.generator
    seed_this_thread(seed)
    try:
        with ThreadGenerator():
            yield
    finally:
        _own.generator = before


@pytest.fixture
def thread_generators(monkeypatch: pytest.MonkeyPatch) -> type[ThreadGenerator]:
    """`steps` seeds the thread's own generator; enter the mode in each rank's function."""
    for name in ("allstep.train.batch", "allstep.train.own_loop"):
        monkeypatch.setattr(import_module(name), "seed_all", seed_this_thread)
    return ThreadGenerator
