"""Finds out, after a call has failed, which ranks are not in any call.

A rank may be missed because it waits in another group, for a rank that is in that group alone.
So a roll call asks the own group's ranks, then those of the groups in which these wait, and so
on: missing is who was asked and waits nowhere.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from allstep.comm.roster import Roster, Word

__all__ = ["Roll", "call_roll", "listed"]

_GRACE_S = 0.5  # ranks that waited together fail about together
_POLL_S = 0.02


@dataclass(frozen=True)
class Roll:
    """Who waits where, and who does not; all by their numbers in the first group.

    Attributes:
        words: what those who wait have left.
        missing: who was asked and has left none.
    """

    words: Mapping[int, Word]
    missing: Sequence[int]

    def __str__(self) -> str:
        """A sentence or two; empty if nothing was found out.

        >>> print(Roll({0: Word("barrier", "split"), 2: Word("barrier")}, [1, 3]))
        Waiting: ranks 0, 2 in `barrier`; missing: ranks 1, 3. Last met: ranks 1, 3 in `split`.
        """
        if not self.words:
            return ""
        waiting = _by_verb({number: word.verb for number, word in self.words.items()})
        missing = f"; missing: {listed(self.missing)}" if self.missing else ""
        last_met = _by_verb(self._last_met())
        return f"Waiting: {waiting}{missing}.{f' Last met: {last_met}.' if last_met else ''}"

    def _last_met(self) -> dict[int, str]:
        """Missing rank -> the last call in which one of those who wait has met it."""
        return {
            number: word.last_met
            for number in self.missing
            for word in self.words.values()
            if word.last_met and (not word.numbers or number in word.numbers)
        }


def call_roll(roster: Roster, verb: str) -> Roll:
    """Who waits, and who does not, when this rank's call has failed.

    The store's server may be what failed, and asking it may hang: a thread asks.

    Args:
        roster: of the call's group.
        verb: the call.
    """
    words: dict[int, Word] = {}
    missing: set[int] = set()

    def ask() -> None:
        roster.leave_word(verb)
        deadline = time.monotonic() + _GRACE_S
        with suppress(RuntimeError):
            while time.monotonic() < deadline:
                asked = _concerned(roster, words)
                for number in sorted(asked - words.keys()):
                    word = roster.word_of(number)
                    if word is None:
                        missing.add(number)
                    else:
                        words[number] = word
                if _concerned(roster, words) == words.keys():
                    return
                time.sleep(_POLL_S)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * _GRACE_S)
    found = dict(words)
    return Roll(found, sorted(missing.copy() - found.keys()))


def _concerned(roster: Roster, words: Mapping[int, Word]) -> set[int]:
    """The ranks of the groups in which someone waits."""
    groups = [roster.numbers, *(word.numbers for word in words.values())]
    return {number for group in groups for number in group or range(roster.size)}


def _by_verb(verbs: Mapping[int, str]) -> str:
    """>>> _by_verb({0: "send", 1: "recv", 2: "send"})
    'rank 1 in `recv`; ranks 0, 2 in `send`'
    """
    return "; ".join(
        f"{listed([number for number in sorted(verbs) if verbs[number] == verb])} in `{verb}`"
        for verb in sorted(set(verbs.values()))
    )


def listed(ranks: Sequence[int]) -> str:
    """>>> listed([1, 3])
    'ranks 1, 3'
    """
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
