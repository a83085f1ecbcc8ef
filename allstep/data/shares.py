"""Divides a global batch's micro-batches among workers of unequal speed."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from numbers import Real
from statistics import median
from typing import Literal

from allstep.data.sampler import local_part
from allstep.errors import UsageError

SharesArgument = Literal["equal", "measured"] | Sequence[float]

_NUM_REPORTS = 7  # steps measured for a division; by their median one slow step changes nothing
_GAIN = 0.9  # a new division must take less than this share of the present step's time


class Shares:
    """The division of each global batch's micro-batches into a contiguous part for each worker.

    [Note: shares] A worker's step takes as long as its micro-batches, and all wait for the slowest.
    With s_r seconds per micro-batch on worker r, the division n_0, n_1, ... minimises

        max_r n_r s_r        sum_r n_r = number of micro-batches

    Which worker runs a micro-batch doesn't change the result, so the division may change after any
    step. All workers have the same seconds (which are sent with the gradients), so all compute the
    same division at the same step without further messages. It changes only if, by the medians of
    seven steps, the step gets at least a tenth shorter. Each worker keeps at least one micro-batch,
    so that its speed can be measured.

    Args:
        how: "equal"; "measured"; or a number for each worker, in proportion to its speed.
        num_workers: number of workers.

    Attributes:
        how, num_workers: the arguments.

    Raises:
        UsageError: if `how` is none of these.

    >>> Shares([3, 1], 2).parts(8)
    (range(0, 6), range(6, 8))
    """

    def __init__(self, how: SharesArgument, num_workers: int) -> None:
        if not isinstance(how, (str, Iterable)):
            raise UsageError(f"`shares` (={how!r}) must be 'equal', 'measured' or numbers.")
        self.how = how if isinstance(how, str) else tuple(how)
        self.num_workers = num_workers
        self._seconds: tuple[float, ...] | None = None  # per micro-batch; None if all are equal
        self._reports: deque[tuple[float, ...]] = deque(maxlen=_NUM_REPORTS)
        self._parts = lru_cache(maxsize=16)(self._cut)
        if isinstance(self.how, str):
            if self.how not in ("equal", "measured"):
                raise UsageError(f"`shares` (={how!r}) must be 'equal', 'measured' or numbers.")
            return
        if len(self.how) != num_workers:
            raise UsageError(
                f"`shares` (={list(self.how)}) has {len(self.how)} numbers for {num_workers}"
                " workers; give one for each."
            )
        if not all(_is_positive(share) for share in self.how):
            raise UsageError(f"`shares` (={list(self.how)}) must be positive numbers.")
        self._seconds = tuple(1 / float(share) for share in self.how)

    @property
    def is_measured(self) -> bool:
        """Whether the division follows the workers' measured seconds."""
        return self.how == "measured" and self.num_workers > 1

    @property
    def is_equal(self) -> bool:
        """Whether the division is always equal."""
        return self.how == "equal" or self.num_workers == 1

    def parts(self, num_micro_batches: int) -> tuple[range, ...]:
        """The micro-batches of each worker, by their index in the global batch."""
        return self._parts(num_micro_batches)

    def follow(self, seconds: Sequence[float], num_micro_batches: int) -> bool:
        """Records the workers' seconds per micro-batch in a step, and may change the division.

        Args:
            seconds: seconds per micro-batch, [workers], the same on all workers; 0 for a worker
                without micro-batches; empty if nothing was measured yet.
            num_micro_batches: number of micro-batches of a global batch.

        Returns:
            Whether the division has changed.
        """
        is_known = len(seconds) == self.num_workers and all(map(_is_positive, seconds))
        if not self.is_measured or not is_known:
            return False
        self._reports.append(tuple(seconds))
        if len(self._reports) < _NUM_REPORTS:
            return False
        medians = tuple(map(median, zip(*self._reports, strict=True)))
        best = _best_cut(num_micro_batches, medians, keeps_one=True)
        present = [len(part) for part in self.parts(num_micro_batches)]
        if not _longest(best, medians) < _GAIN * _longest(present, medians):
            return False
        self._seconds = medians
        self._parts.cache_clear()
        self._reports.clear()
        return True

    def in_words(self, num_micro_batches: int) -> str | None:
        """The slower ranks with their numbers of micro-batches; None if all are about as fast.

        >>> shares = Shares("measured", 2)
        >>> any(shares.follow([0.1, 0.29], 4) for _ in range(9))
        True
        >>> shares.in_words(4)
        'rank 1 is 2.9x slower: 1 of 4 micro-batches'
        """
        if self._seconds is None or self.num_workers == 1:
            return None
        counts = [len(part) for part in self.parts(num_micro_batches)]
        fastest = min(self._seconds)
        slower = sorted(
            (-s / fastest, rank) for rank, s in enumerate(self._seconds) if s > 1.05 * fastest
        )
        told = [
            f"rank {rank} is {-factor:.1f}x slower: {counts[rank]} of {num_micro_batches}"
            " micro-batches"
            for factor, rank in slower[:3]
        ]
        rest = f"; and {len(slower) - 3} others" if len(slower) > 3 else ""
        return "; ".join(told) + rest if told else None

    def _cut(self, num_micro_batches: int) -> tuple[range, ...]:
        size = self.num_workers
        if self._seconds is None:
            return tuple(local_part(num_micro_batches, rank, size) for rank in range(size))
        counts = _best_cut(num_micro_batches, self._seconds, keeps_one=self.is_measured)
        ends = [sum(counts[: rank + 1]) for rank in range(size)]
        return tuple(range(end - n, end) for end, n in zip(ends, counts, strict=True))


def _best_cut(num: int, seconds: Sequence[float], *, keeps_one: bool) -> list[int]:
    """The number of `num` micro-batches for each worker that minimises the time of the slowest."""
    first = int(keeps_one and num >= len(seconds))
    counts = [first] * len(seconds)
    ends = [((first + 1) * s, rank) for rank, s in enumerate(seconds)]
    heapify(ends)
    for _ in range(num - sum(counts)):
        _, rank = ends[0]
        counts[rank] += 1
        heapreplace(ends, ((counts[rank] + 1) * seconds[rank], rank))
    return counts


def _longest(counts: Sequence[int], seconds: Sequence[float]) -> float:
    return max(n * s for n, s in zip(counts, seconds, strict=True))


def _is_positive(number: object) -> bool:
    return (
        not isinstance(number, bool) and isinstance(number, Real) and 0 < float(number) < math.inf
    )
