"""A random state for each thread, so that ranks as threads can draw dropout masks.

torch's default generator belongs to the process. A dispatch mode belongs to a thread: this one
passes the thread's own generator to every operator that takes one.
"""

import threading
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_own = threading.local()


class ThreadGenerator(TorchDispatchMode):
    """Within it, this thread's operators draw from this thread's generator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.native_dropout.default:
            raise NotImplementedError("native_dropout takes no generator; use processes")
        takes_one = any(argument.name == "generator" for argument in func._schema.arguments)
        if takes_one and kwargs.get("generator") is None:
            kwargs["generator"] = _own.generator
        return func(*args, **kwargs)


def seed_this_thread(seed: int, device: object = None) -> None:
    """Stands in for `seed_all` where ranks are threads."""
    _own.generator = torch.Generator().manual_seed(seed)


@pytest.fixture
def thread_generators(monkeypatch: pytest.MonkeyPatch) -> type[ThreadGenerator]:
    """`steps` seeds the thread's own generator; enter the mode in each rank's function."""
    monkeypatch.setattr(import_module("allstep.train.batch"), "seed_all", seed_this_thread)
    return ThreadGenerator
