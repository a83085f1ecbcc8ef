"""Objects that are held weakly, and seen by several threads."""

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import ref

__all__ = ["WeakList"]

T = TypeVar("T")


class WeakList(Generic[T]):
    """What is still alive of what was added, in that order.

    One thread may go through it, without a lock, while another one adds to it or the last
    reference to an object goes: what is gone through never changes.

    >>> numbers, kept = WeakList(), {1, 2}
    >>> numbers.add(kept), numbers.add({3})
    (None, None)
    >>> list(numbers)
    [{1, 2}]
    """

    def __init__(self) -> None:
        self._refs: tuple[ref[T], ...] = ()
        self._lock = threading.Lock()  # of those that add

    def add(self, item: T) -> None:
        """Holds another one, and lets go of what is dead."""
        with self._lock:
            self._refs = (*(held for held in self._refs if held() is not None), ref(item))

    def __iter__(self) -> Iterator[T]:
        for held in self._refs:
            item = held()
            if item is not None:
                yield item
