"""Random states per sample or micro-batch, which do not depend on the worker."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from operator import index

import numpy as np
import torch
from numpy.typing import NDArray

from allstep.device import preserved_random_state as preserved_torch_state
from allstep.device import seed as seed_torch

_64_BITS = 0xFFFFFFFFFFFFFFFF


def derive_seed(*parts: int) -> int:
    """A seed that depends on all of `parts`, and is the same on every machine.

    Args:
        parts: 64-bit integers, such as (seed, epoch, sample index).

    Returns:
        A 63-bit integer.

    >>> derive_seed(0, 1, 2)
    4450782424123420391
    >>> derive_seed(0, 1, 2) == derive_seed(0, 2, 1)
    False
    """
    message = b"".join((index(part) & _64_BITS).to_bytes(8, "little") for part in parts)
    return int.from_bytes(blake2b(message, digest_size=8).digest(), "little") >> 1


def derive_permutation(num_samples: int, *parts: int) -> NDArray[np.int64]:
    """A permutation of `range(num_samples)` that depends on all of `parts`.

    It sorts random numbers whose low bits are replaced by the indices to permute. A run must be
    resumable after an update of numpy, which guarantees only its raw random numbers to be the same
    in every release. This is also faster than numpy's own permutation.

    >>> derive_permutation(5, 0, 1)
    array([4, 3, 1, 0, 2])
    """
    low = np.uint64((1 << num_samples.bit_length()) - 1)
    keys = np.random.Philox(derive_seed(*parts)).random_raw(num_samples)
    keys &= ~low
    keys |= np.arange(num_samples, dtype=np.uint64)
    keys.sort()
    keys &= low
    return keys.view(np.int64)


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Sets the random states of Python, numpy, torch on the CPU, and `device` if it is another.

    Args:
        seed: a seed from `derive_seed`.
        device: device of the model.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    seed_torch(seed, device)


@contextmanager
def preserved_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restores the states that `seed_all` sets at the end of a `with` block."""
    python, numpy_ = random.getstate(), np.random.get_state()
    try:
        with preserved_torch_state(device):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)
