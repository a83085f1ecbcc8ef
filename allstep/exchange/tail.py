"""Numbers that ride behind gradients, with which workers compare what they came for.

[Note: agreement in the tail] An exchange sends no message of its own to find out whether the
workers mean the same one. Behind the gradients of the first bucket each worker writes the
digits d of its fingerprint, once as they are and once negated, so that worker k's digits meet
worker k + 1's:

    block k:  +d of worker k,  -d of worker k + 1,  0 of the others

After the sum a block is zero exactly where the two agree, in any number format in which whole
numbers up to 127 are exact, and the blocks that aren't zero name the workers. Behind the last
bucket ride a mark for a worker that failed, and for each parameter whether this worker has a
gradient for it: their sum is positive where any has.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["check_size", "disagreeing_ranks", "write_check"]

_NUM_DIGITS = 4
_BASE = 128


def check_size(size: int) -> int:
    """Elements that the comparison of `size` workers takes.

    >>> check_size(1), check_size(3)
    (0, 12)
    """
    return _NUM_DIGITS * size if size > 1 else 0


def write_check(check: Tensor, rank: int, fingerprint: int) -> None:
    """This worker's part of the comparison.

    Args:
        check: [check_size(size)]; overwritten.
        rank: this worker.
        fingerprint: what workers should agree on; its lowest 28 bits are compared.
    """
    check.zero_()
    if not check.numel():
        return
    digits = [(fingerprint >> (7 * i)) % _BASE for i in range(_NUM_DIGITS)]
    blocks = check.view(-1, _NUM_DIGITS)
    mine = torch.tensor(digits, dtype=check.dtype)
    blocks[rank].copy_(mine, non_blocking=True)  # a CUDA device takes it without a halt
    blocks[rank - 1].copy_(-mine, non_blocking=True)


def disagreeing_ranks(check: Tensor) -> Sequence[int]:
    """The workers whose neighbour has another fingerprint; empty if all agree.

    Args:
        check: [check_size(size)], summed over the workers.

    >>> check = torch.zeros(3, 12)
    >>> for rank, fingerprint in enumerate([1000, 1000, 1001]):
    ...     write_check(check[rank], rank, fingerprint)
    >>> disagreeing_ranks(check.sum(0))
    [1, 2]
    """
    if not check.any():
        return []
    return [k for k, block in enumerate(check.view(-1, _NUM_DIGITS)) if block.any()]
