"""The ring that Baidu brought to deep learning."""

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from allstep.comm.agreement import agree
from allstep.comm.algorithms.base import AllReduce
from allstep.comm.group import WorkerGroup


class Ring(AllReduce):
    """Reduce-scatter, then all-gather, each in size - 1 steps around a ring.

    Each step sends one of `size` chunks to the next rank while one arrives from the previous:
    2 (size - 1) messages per rank, and 2 (size - 1) / size of the tensor's bytes, the least that
    is possible. Sums of half-precision numbers are taken in float32 and rounded at each step.

    Args:
        comm: the workers.
        order: the ranks in the order in which they follow one another on the ring, such as along
            the cables; None for 0, 1, 2, ….

    Raises:
        UsageError: if `order` is not a permutation of the ranks.
        DisagreementError: if ranks pass different orders.

    Source: Patarasuk and Yuan, 2009; Gibiansky, "Bringing HPC techniques to deep learning",
    2017, whose numbering of the chunks is used here.
    """

    name: ClassVar[str] = "ring"

    def __init__(self, comm: WorkerGroup, order: Sequence[int] | None = None) -> None:
        super().__init__(comm)
        if order is not None:
            self._agree_on(tuple(order))
        order = range(comm.size) if order is None else tuple(order)
        self._place = order.index(comm.rank)
        self._next = order[(self._place + 1) % comm.size]
        self._previous = order[(self._place - 1) % comm.size]

    def _agree_on(self, order: tuple[int, ...]) -> None:
        fault = None
        if sorted(order) != list(range(self.comm.size)):
            last = self.comm.size - 1
            fault = f"`order` (={order}) must name each of the ranks 0 to {last} once."
        agree(self.comm, f"make a ring in the order {order}", fault=fault)

    def _reduce_(self, flat: Tensor) -> None:
        chunks = flat.tensor_split(self.comm.size)
        self.reduce_scatter_(chunks)
        self.all_gather_(chunks)

    def reduce_scatter_(self, chunks: Sequence[Tensor]) -> Tensor:
        """Sums chunk `place + 1` at each place of the ring, in place, and returns it."""
        size, place = self.comm.size, self._place
        arrived = torch.empty_like(chunks[0])  # the first chunk is at least as long as any other
        for step in range(size - 1):
            outgoing, partial = chunks[(place - step) % size], chunks[(place - step - 1) % size]
            incoming = arrived[: len(partial)]
            self._messenger.exchange(outgoing, self._next, incoming, self._previous)
            partial.add_(incoming)
        return chunks[(place + 1) % size]

    def all_gather_(self, chunks: Sequence[Tensor]) -> None:
        """Passes the sums around until all ranks have all of them."""
        size, place = self.comm.size, self._place
        for step in range(size - 1):
            outgoing, incoming = chunks[(place + 1 - step) % size], chunks[(place - step) % size]
            self._messenger.exchange(outgoing, self._next, incoming, self._previous)


@lru_cache(maxsize=1024)  # called for each bucket in each step
def ring_sends(num_elements: int, size: int, place: int) -> tuple[int, int]:
    """Elements and messages that a place of the ring sends: all chunks but one, twice.

    >>> ring_sends(5, 2, 0), ring_sends(5, 2, 1), ring_sends(1, 3, 0)
    ((5, 2), (5, 2), (2, 2))
    """
    shortest, num_longer = divmod(num_elements, size)  # the first chunks are longer by one
    kept = ((place + 1) % size, (place + 2) % size)  # not sent in the scatter and in the gather
    num_sent = 2 * num_elements - sum(shortest + (chunk < num_longer) for chunk in kept)
    if shortest:
        return num_sent, 2 * (size - 1)
    return num_sent, num_sent  # chunks of one element; empty ones are not sent
