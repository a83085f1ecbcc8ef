"""Random states that belong to a sample or a micro-batch, never to a worker."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch

__all__ = ["derive_seed", "preserved_random_state", "seed_all"]


def derive_seed(*parts: int) -> int:
    """A seed that depends on all of `parts`, and is the same on every machine.

    Args:
        parts: integers of 64 bits, such as (seed, epoch, sample index).

    Returns:
        An integer of 63 bits.

    >>> derive_seed(0, 1, 2) == derive_seed(0, 1, 2)
    True
    >>> derive_seed(0, 1, 2) == derive_seed(0, 2, 1)
    False
    """
    message = b"".join((part & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little") for part in parts)
    return int.from_bytes(blake2b(message, digest_size=8).digest(), "little") >> 1


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Sets the random states of python, numpy, torch's CPU and, if it is CUDA, of `device`.

    torch.manual_seed would do the same for all devices at once, at eighty times the cost.

    Args:
        seed: from `derive_seed`.
        device: where the model runs.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Puts the random states of python, numpy and torch's CPU back as they were."""
    python, numpy_, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)
        torch.set_rng_state(torch_)
