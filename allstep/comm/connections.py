"""Gloo's connections beside a group's calls: whether they are there still, and how to close them.

[Note: missed ends] Gloo tells the end of a connection to the calls that are queued on it, but not
to one whose bytes it is just receiving or sending: that lasts until its timeout. So whoever waits
for long looks, now and then, whether the connections that the call needs are there still. For a
message, whose wait can't be cut in pieces, that takes a thread, which made rings of messages of
4 MiB slower by a fifth inside of a host: those of less than 16 MiB are left to their timeout. A
rank that has made all its calls may close its connections while others end theirs; it says so in
the group's store. Where that is gone, too, a call has some seconds to end.
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
_TAG = (1 << 31) - 1  # nothing is ever sent with it


class Connections:
    """Those of a group of Gloo's.

    Args:
        group: whose they are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._gone_since_s: dict[int, float] = {}

    def check(self, peers: Iterable[int] | None) -> None:
        """Raises Gloo's RuntimeError if a peer's is closed and the peer has not left well.

        Args:
            peers: ranks of the group; None for all others.
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
        """Says that this rank has made all its calls, before its connections are closed."""
        with suppress(RuntimeError):
            self._group.get_group_store().set(_key(self._group.rank()), "")

    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.size()) if rank != self._group.rank()]

    def _has_left(self, peer: int) -> bool | None:
        """Whether a peer has left well; None if nobody can say."""
        store = self._group.get_group_store()
        return answer_of_store(lambda: store.check([_key(peer)]))

    def close(self) -> None:
        """Closes them, so that the group's other ranks fail at once.

        Gloo closes them itself when nobody holds the group any more, which cannot be known here.
        So let a call time out: the first that does closes all; on one that is closed already a
        call fails for that reason.
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
