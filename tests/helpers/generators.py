"""A random state for each thread, since torch's default generator belongs to the process.

What draws random numbers on the CPU gets the thread's own generator, so that what a rank draws
depends on its seed and not on which thread draws first.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.library import Library, get_kernel

from allstep.data.random import seed_all

_own = threading.local()
_seed_process = torch.manual_seed

# What dropout and initial values come down to, too.
_DRAWING = [
    *("bernoulli.out", "bernoulli_.Tensor", "bernoulli_.float", "binomial", "cauchy_"),
    *("exponential_", "geometric_", "log_normal_", "multinomial", "multinomial.out"),
    *("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor", "normal_", "poisson"),
    *("random_", "random_.from", "random_.to", "randperm.generator_out", "rrelu_with_noise"),
    *("uniform_", "_sample_dirichlet", "_standard_gamma"),
]


@contextmanager
def own_generators() -> Iterator[None]:
    """Within it, `rank_generator` and `torch.manual_seed` hold for their thread.

    Kernels in place of torch's: modes would do it, and take longer at every operator than most run.
    """
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in _DRAWING:
            library.impl(name, _with_own_generator(name), "CPU", with_keyset=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", manual_seed)
        yield
    library._destroy()


def _with_own_generator(name: str) -> Callable[..., Any]:
    kernel = get_kernel(f"aten::{name}", "CPU")

    def draw(keys: Any, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        if generator is None:
            generator = getattr(_own, "generator", None)
        return kernel.call_boxed(keys, *args, generator=generator, **kwargs)

    return draw


@contextmanager
def rank_generator(seed: int) -> Iterator[None]:
    """Within it, this thread draws from a generator of its own."""
    _own.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        del _own.generator


def manual_seed(seed: int) -> torch.Generator:
    """Stands in for torch's: a rank that is a thread seeds its own generator, not the others'."""
    generator: torch.Generator | None = getattr(_own, "generator", None)
    return _seed_process(seed) if generator is None else generator.manual_seed(seed)


def seed_this_thread(seed: int, device: object = None) -> None:
    """Stands in for `seed_all` where ranks are threads."""
    manual_seed(seed)


@contextmanager
def seeded_thread(seed: int, device: torch.device) -> Iterator[None]:
    """Stands in for `allstep.nn.chain.seeded` where ranks are threads."""
    before = _own.generator
    try:
        with rank_generator(seed):
            yield
    finally:
        _own.generator = before


@pytest.fixture
def thread_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """`steps` and loaders seed the thread's own generator."""
    for name in ("batch", "elastic_loop", "loop_state", "own_loop"):
        monkeypatch.setattr(import_module(f"allstep.train.{name}"), "seed_all", seed_this_thread)

    def seed_sample(seed: int) -> None:
        seed_all(seed)  # Python's and numpy's, too: ranks fetch one after the other
        seed_this_thread(seed)

    monkeypatch.setattr(import_module("allstep.data.fetch"), "seed_all", seed_sample)
