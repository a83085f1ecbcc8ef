"""Finds out, after a call has failed, which ranks are not in any call."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from torch._C._distributed_c10d import Store

__all__ = ["call_roll", "listed", "report"]

_GRACE_S = 0.5  # ranks that waited together fail about together
_POLL_S = 0.02


def report(store: Store, rank: int, verb: str) -> None:
    """Tells the others in which call this rank failed."""
    with suppress(RuntimeError):
        store.set(_key(rank), verb)


def call_roll(store: Store, rank: int, size: int, verb: str) -> str:
    """A sentence about where the other ranks are; empty if the store is gone.

    The store's server may be what failed, and asking it may hang: a thread asks.
    """
    answers: dict[int, str] = {}

    def ask() -> None:
        report(store, rank, verb)
        deadline = time.monotonic() + _GRACE_S
        with suppress(RuntimeError):
            while len(answers) < size and time.monotonic() < deadline:
                for other in set(range(size)) - answers.keys():
                    if store.check([_key(other)]):
                        answers[other] = store.get(_key(other)).decode()
                time.sleep(_POLL_S)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * _GRACE_S)
    return _sentence(dict(answers), size)


def _sentence(verbs: dict[int, str], size: int) -> str:
    """>>> _sentence({0: "barrier", 2: "barrier"}, 4)
    'Waiting: ranks 0, 2 in `barrier`; missing: ranks 1, 3.'
    """
    if not verbs:
        return ""
    waiting = "; ".join(
        f"{listed([rank for rank in sorted(verbs) if verbs[rank] == verb])} in `{verb}`"
        for verb in sorted(set(verbs.values()))
    )
    missing = [rank for rank in range(size) if rank not in verbs]
    return f"Waiting: {waiting}{'; missing: ' + listed(missing) if missing else ''}."


def listed(ranks: Sequence[int]) -> str:
    """>>> listed([1, 3])
    'ranks 1, 3'
    """
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _key(rank: int) -> str:
    return f"allstep/stuck/{rank}"
