"""What errors call the ranks of a group, and the words that ranks leave when a call fails.

[Note: roster] A group that `split` has made counts its ranks from 0 again. Whoever looks for a
rank that is missing knows the numbers of the first group, which `init` made, so errors give
those, whatever group a call belongs to. Words lie in the first group's store, where all can read
them: why a rank is missed in one group may be told by another one (see roll_call.py).
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import Store

__all__ = ["Roster", "Word"]


@dataclass(frozen=True)
class Word:
    """What a rank says whose call failed.

    Attributes:
        verb: the call.
        last_met: the last call in which its group's ranks have met; empty if there was none.
        numbers: of the group's ranks; empty for all there are.
    """

    verb: str
    last_met: str = ""
    numbers: tuple[int, ...] = ()


class Roster:
    """The ranks of a group by their numbers in the first group. [Note: roster]

    Args:
        numbers: rank -> its number.
        rank: this one.
        size: of the first group.
        store: of the first group; None for a single process.

    Attributes:
        own: this rank, for messages.
        last_met: the last call that ended here and needs all ranks of the group to come.

    >>> Roster(range(4), 2, 4).part([2, 3], 0).own
    'rank 2 of 4'
    """

    def __init__(
        self, numbers: Sequence[int], rank: int, size: int, store: Store | None = None
    ) -> None:
        self.numbers = tuple(numbers)
        self.size = size
        self.number = self.numbers[rank]
        self.own = f"rank {self.number} of {size}"
        self.last_met = ""
        self._store = store

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Roster":
        """Of a first group."""
        size = group.size()
        return cls(range(size), group.rank(), size, group.get_group_store())

    def named(self, rank: int) -> str:
        """A rank of this group, for messages.

        >>> Roster([2, 3], 0, 4).named(1)
        'rank 3'
        """
        return f"rank {self.numbers[rank]}"

    def part(self, ranks: Sequence[int], rank: int) -> "Roster":
        """Of a group of some of these ranks, in their order there; this one has `rank` there."""
        return Roster([self.numbers[r] for r in ranks], rank, self.size, self._store)

    def leave_word(self, verb: str) -> None:
        """Tells the others in which call this rank failed."""
        numbers = self.numbers if len(self.numbers) < self.size else ()
        if self._store is not None:
            with suppress(RuntimeError):
                text = json.dumps([verb, self.last_met, numbers])
                self._store.set(_key(self.number), text)

    def take_word_back(self) -> None:
        """Tells the others that this rank goes on."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.delete_key(_key(self.number))

    def word_of(self, number: int) -> Word | None:
        """What the rank of that number has left, if anything; RuntimeError if the store is gone."""
        if self._store is None or not self._store.check([_key(number)]):
            return None
        verb, last_met, numbers = json.loads(self._store.get(_key(number)))
        return Word(verb, last_met, tuple(numbers))


def _key(number: int) -> str:
    return f"allstep/stuck/{number}"
