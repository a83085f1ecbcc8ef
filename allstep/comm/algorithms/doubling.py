"""All-reduces between ranks 1, 2, 4, … apart, for networks whose latency matters."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from allstep.comm.algorithms.base import AllReduce


class _Folded(AllReduce):
    """An algorithm for powers of two, extended to any number of ranks.

    Ranks beyond the largest power of two first send their tensor to a partner, and get the sum at
    the end.
    """

    def _reduce_(self, flat: Tensor) -> None:
        rank, size = self.comm.rank, self.comm.size
        power = 1 << (size.bit_length() - 1)
        if rank >= power:
            self._messenger.send(flat, rank - power).wait()
            self._messenger.recv(flat, rank - power).wait()
            return
        folds = rank < size - power
        if folds:
            extra = torch.empty_like(flat)
            self._messenger.recv(extra, rank + power).wait()
            flat.add_(extra)
        self._reduce_among_(flat, power)
        if folds:
            self._messenger.send(flat, rank + power).wait()

    @abstractmethod
    def _reduce_among_(self, flat: Tensor, power: int) -> None:
        """Sums over the first `power` ranks, a power of two; only these ranks call it."""


class RecursiveDoubling(_Folded):
    """Partners exchange whole tensors and add them, in lg(size) messages.

    No algorithm needs fewer messages, and between two ranks none needs fewer bytes. Sums of
    half-precision numbers are taken in float32 and rounded at each step.

    Source: Thakur, Rabenseifner and Gropp, 2005, section 4.5.
    """

    name: ClassVar[str] = "recursive_doubling"

    def _reduce_among_(self, flat: Tensor, power: int) -> None:
        incoming = torch.empty_like(flat)
        distance = 1
        while distance < power:
            partner = self.comm.rank ^ distance
            self._messenger.exchange(flat, partner, incoming, partner)
            flat.add_(incoming)
            distance *= 2


class HalvingDoubling(_Folded):
    """Reduce-scatter by halving, all-gather by doubling: 2 lg(size) messages.

    In each step two ranks exchange halves of the part that they share, and add: the part halves
    with each step, and so does the partner's distance, from half of the ranks down to 1. The
    all-gather sends the sums back in the opposite order.

    Source: Thakur, Rabenseifner and Gropp, 2005, section 4.5.
    """

    name: ClassVar[str] = "halving_doubling"

    def _reduce_among_(self, flat: Tensor, power: int) -> None:
        arrived = torch.empty_like(flat[: -(-len(flat) // 2)])
        own = flat
        steps: list[tuple[int, Tensor, Tensor]] = []  # partner, part kept here, part kept there
        distance = power // 2
        while distance:
            low, high = own.tensor_split(2)
            own, other = (high, low) if self.comm.rank & distance else (low, high)
            partner = self.comm.rank ^ distance
            incoming = arrived[: len(own)]
            self._messenger.exchange(other, partner, incoming, partner)
            own.add_(incoming)
            steps.append((partner, own, other))
            distance //= 2
        for partner, mine, other in reversed(steps):
            self._messenger.exchange(mine, partner, other, partner)
