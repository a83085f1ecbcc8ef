"""Numbers that are sent behind gradients: comparisons of the workers, and their notes.

[Note: agreement in the tail] An exchange sends no separate message to find out whether the
workers make the same exchange. Behind the gradients of the first bucket each worker writes the
digits d of its fingerprint, once unchanged and once negated, so that worker k's digits are added
to worker k + 1's:

    block k:  +d of worker k,  -d of worker k + 1,  0 of the others

After the sum a block is zero exactly where the two agree, in any number format in which whole
numbers up to 127 are exact, and the blocks that aren't zero name the workers. The digits of a
checksum, which may be on a device, are added to them: [Note: state sweep]. Behind the last bucket
are a mark of workers that failed, and for each parameter whether this worker has a gradient for
it: their sum is positive if any worker has.

[Note: notes] Behind the comparison each worker has its own section, of digits up to 127, which the
others leave zero; so the sum holds what all have written. A section has the weights of the worker's
losses ([Note: weights]) and the times of its last step (`stragglers.py`).

[Note: late reading] On the CPU a worker reads the sums as soon as it has them, and stops before it
sends anything that the others don't expect. On an accelerator reading would make the host wait for
the device in every step. There the few numbers are copied after the exchange, and the host reads
them when the next exchange, or any other collective operation, starts: by then they have long
arrived. So a disagreement is found one step late, on every worker at the same point, and after one
update that must not be used. All buckets are sent in any case, because the next collective would
meet them.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from allstep.device import is_accelerator
from allstep.errors import UsageError
from allstep.exchange.state_sweep import checksum
from allstep.exchange.stragglers import NUM_TIME_DIGITS, WorkerTimes
from allstep.exchange.weighing import (
    NUM_WEIGHT_DIGITS,
    Weighing,
    digits_of_units,
    mixed_message,
    total_of,
)

_NUM_DIGITS = 4
_BASE = 128
_WEIGHTS = slice(2, 2 + NUM_WEIGHT_DIGITS)
_TIMES = slice(_WEIGHTS.stop, _WEIGHTS.stop + NUM_TIME_DIGITS)
_NUM_NOTE = _TIMES.stop


def check_size(size: int) -> int:
    """Number of elements in the comparison of `size` workers.

    >>> check_size(1), check_size(3)
    (0, 12)
    """
    return _NUM_DIGITS * size if size > 1 else 0


def write_check(check: Tensor, rank: int, fingerprint: int, words: Tensor | None = None) -> None:
    """Writes this worker's part of the comparison.

    Args:
        check: [check_size(size)]; overwritten.
        rank: this worker's rank.
        fingerprint: a number that must be equal on all workers; its lowest 28 bits are compared.
        words: whole numbers on the device of `check` that must be equal, too.
    """
    if not check.numel():
        return
    if words is not None and not is_accelerator(words.device):
        fingerprint, words = fingerprint + zlib.crc32(words.numpy().data), None
    mine = torch.tensor([(fingerprint >> (7 * i)) % _BASE for i in range(_NUM_DIGITS)])
    mine = mine.to(check.device, non_blocking=True)  # without a halt
    if words is not None:
        shifts = torch.arange(0, 7 * _NUM_DIGITS, 7, device=words.device)
        mine = (mine + (checksum(words) >> shifts)) % _BASE
    blocks = check.zero_().view(-1, _NUM_DIGITS)
    blocks[rank] = mine
    blocks[rank - 1] = -mine


def disagreeing_ranks(check: Tensor) -> Sequence[int]:
    """The ranks whose neighbour has another fingerprint; empty if all agree.

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


def note_size(size: int) -> int:
    """Number of elements in the notes of `size` workers."""
    return _NUM_NOTE * size if size > 1 else 0


def write_note(notes: Tensor, rank: int, weighing: Weighing, times: WorkerTimes) -> None:
    """Writes this worker's note in its own section; the others stay zero.

    Args:
        notes: [note_size(size)]; overwritten.
        rank: this worker's rank.
        weighing: the weights of its losses.
        times: the times of its last step.
    """
    notes.zero_()
    if notes.numel():
        own = list(note_of(weighing, times))
        mine = torch.tensor(own, dtype=notes.dtype).to(notes.device, non_blocking=True)
        notes.view(-1, _NUM_NOTE)[rank] = mine


def note_of(weighing: Weighing, times: WorkerTimes) -> bytes:
    """One worker's note as a separate message, if there are no gradients to send it with.

    Args:
        weighing: the weights of its losses.
        times: the times of its last step.
    """
    weights = (weighing.has_means, weighing.has_sums, *digits_of_units(weighing.units))
    return bytes((*weights, *times.digits()))


def notes_of(told: Sequence[bytes]) -> Tensor:
    """The workers' notes, as a sum of `write_note`'s, from each worker's `note_of`."""
    return torch.tensor(list(b"".join(told)), dtype=torch.float64)


def total_weight(notes: Tensor, weighing: Weighing) -> Tensor | None:
    """The sum of weights over the workers; None if losses were means.

    Args:
        notes: [note_size(size)], summed; empty for a single worker.
        weighing: the weights of this worker's losses.
    """
    if weighing.has_means:
        return None
    if not notes.numel():
        total = torch.tensor(weighing.total(), dtype=torch.float64)
        return total if weighing.has_sums else None
    rows = notes.view(-1, _NUM_NOTE)
    has_sums = rows[:, 1].any()
    if not is_accelerator(notes.device) and not has_sums:
        return None
    total = total_of(rows[:, _WEIGHTS])
    # A worker without a micro-batch learns from the others; on CUDA without a look.
    return total if weighing.has_sums else torch.where(has_sums, total, 1 / weighing.factor)


def refuse_mixed_weights(notes: Tensor) -> None:
    """Raises UsageError on all workers if some gave weighted sums and others means."""
    kinds = notes.view(-1, _NUM_NOTE)[:, :2] > 0
    if notes.numel() and kinds.any(0).all():
        raise UsageError(mixed_message(*kinds.T.tolist()))


def times_in(notes: Tensor) -> Tensor:
    """Each worker's times, as digits [size, NUM_TIME_DIGITS] for `times_of`."""
    return notes.view(-1, _NUM_NOTE)[:, _TIMES]
