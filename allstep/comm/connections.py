"""Gloo's connections, apart from a group's calls: checks that they are open, and closes them.

[Note: missed ends] When a connection closes, Gloo fails the calls that are queued on it, but not
one whose bytes it is just receiving or sending: that lasts until its timeout. So a long wait
checks from time to time that the connections that its call needs are still open. The wait for an
exchange, whose messages another thread waits for, checks those of the whole group. Elsewhere the
wait for a message can't be cut into pieces, so it takes a thread, which made rings of messages of
4 MiB slower by a fifth within a host: messages of less than 16 MiB that no exchange sends are left
to their timeout. A rank that has
made all its calls may close its connections while others end theirs; it says so in the group's
store. Where the store is gone, too, a call has some seconds to end.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from allstep.comm.failures import is_timeout
from allstep.comm.work import answer_of_store

_UNKNOWN_S = 5.0
_TAG = (1 << 31) - 1  # no message is ever sent with this tag


class Connections:
    """The connections of a Gloo group.

    Args:
        group: the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._gone_since_s: dict[int, float] = {}

    def check(self, peers: Iterable[int] | None) -> None:
        """Raises Gloo's RuntimeError if a peer's connection is closed, unless the peer has left.

        Args:
            peers: ranks of the group; None for all other ranks.
        """
        for peer in self._others() if peers is None else peers:
            try:
                self._group.recv([torch.empty(1)], peer, _TAG)
            except RuntimeError:
                since_s = self._gone_since_s.setdefault(peer, time.monotonic())
                has_left = self._has_left(peer)
                if has_left is None:
                    has_left = time.monotonic() < since_s + _UNKNOWN_S
                if not has_left:
                    raise

    def leave(self) -> None:
        """Records in the store that this rank has made all its calls, before connections close."""
        with suppress(RuntimeError):
            self._group.get_group_store().set(_key(self._group.rank()), "")

    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.size()) if rank != self._group.rank()]

    def _has_left(self, peer: int) -> bool | None:
        """Whether a peer has recorded that it left; None if the store does not answer."""
        store = self._group.get_group_store()
        return answer_of_store(lambda: store.check([_key(peer)]))

    def close(self) -> None:
        """Closes the connections, so that the group's other ranks fail at once.

        Gloo closes them by itself when the last reference to the group is gone, but others may hold
        one. So this makes a call time out, whereupon Gloo closes all connections. On a connection
        that is closed already the call fails for that reason, and the next one is tried.
        """
        for peer in self._others():
            try:
                call = self._group.recv([torch.empty(1)], peer, _TAG)
                call.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if is_timeout(error):
                    break


def _key(rank: int) -> str:
    return f"allstep/left/{rank}"
