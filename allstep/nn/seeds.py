"""Initial values that do not depend on how an array is split."""

from hashlib import blake2b

import torch

from allstep.nn.windows import Grid

__all__ = ["agreed_seed", "generator_at"]


def agreed_seed(grid: Grid, seed: int | None) -> int:
    """The same seed on all workers: rank 0's, which is drawn from torch's generator if None."""
    drawn = int(torch.randint(2**62, ()).item()) if seed is None else seed
    agreed: int = grid.comm.broadcast_object(drawn)
    return agreed


def generator_at(seed: int, *position: int) -> torch.Generator:
    """A generator for the values at one global position."""
    digest = blake2b(repr((seed, position)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
