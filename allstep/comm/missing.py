"""Which ranks are missing when a call has failed, and what errors call them.

[Note: rank names] A group that `split` has made counts its ranks from 0 again. Whoever looks for
a rank that is missing knows the numbers of the first group, which `init` made, so errors give
those, whatever group a call belongs to.

[Note: stuck reports] A rank whose call fails leaves a report in the first group's store, where
all can read it. A rank may be missing because it waits in another group, for a rank that is in
that group only. So `find_missing_ranks` asks the own group's ranks, then those of the groups in
which these wait, and so on: missing is who was asked and has left no report.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from allstep.comm.activity import Activity
from allstep.comm.places import Place
from allstep.comm.work import ThreadWork
from allstep.errors import CollectiveTimeoutError, PeerLostError, first_few

_GRACE_S = 0.5  # ranks that waited together fail about together
_MOMENT_S = 0.05
_POLL_S = 0.02
_MOST = 8  # ranks that an error names


@dataclass(frozen=True)
class StuckReport:
    """What a rank says whose call failed.

    Attributes:
        verb: the call.
        last_call: the last call in which its group's ranks have met; empty if there was none.
        numbers: of the group's ranks; empty for all there are.
    """

    verb: str
    last_call: str = ""
    numbers: tuple[int, ...] = ()


class RankNames:
    """The ranks of a group by their numbers in the first group. [Note: rank names]

    Args:
        numbers: rank -> its number.
        rank: this one.
        size: of the first group.
        store: of the first group; None for a single process.
        places: number -> where it runs; empty if that is not known.
        activity: of this worker; a new one if None.
        has_ended: whether it is known of a place that the process there has ended.

    Attributes:
        own: this rank, for messages.
        last_call: the last call that ended here and needs all ranks of the group to come.
        is_interrupted: whether this process has closed the group's connections by itself, as it
            knows of a rank that is lost.
        has_left: whether this rank has given the group up: its calls that end by that are no
            report of another's failure.

    >>> RankNames(range(4), 2, 4).part([2, 3], 0).own
    'rank 2 of 4'
    """

    def __init__(
        self,
        numbers: Sequence[int],
        rank: int,
        size: int,
        store: Store | None = None,
        places: Sequence[Place] = (),
        activity: Activity | None = None,
        has_ended: Callable[[Place], bool] = Place.has_ended,
    ) -> None:
        self.numbers = tuple(numbers)
        self.size = size
        self.number = self.numbers[rank]
        self.own = f"rank {self.number} of {size}"
        self.last_call = ""
        self.is_interrupted = False
        self.has_left = False
        self.places = places
        self.activity = activity or Activity()
        self._store = store
        self._has_ended = has_ended

    @classmethod
    def of(cls, group: dist.ProcessGroup, places: Sequence[Place] = ()) -> "RankNames":
        """Of a first group."""
        size = group.size()
        return cls(range(size), group.rank(), size, group.get_group_store(), places)

    def named(self, rank: int) -> str:
        """A rank of this group, for messages.

        >>> RankNames([2, 3], 0, 4).named(1)
        'rank 3'
        """
        return f"rank {self.numbers[rank]}"

    def placed(self, number: int) -> str:
        """The rank of that number, for messages, and where it runs, if that is known.

        >>> RankNames(range(2), 0, 2, places=[Place("a", 7), Place("b", 8)]).placed(1)
        'rank 1 (process 8 on b)'
        """
        return f"rank {number} ({self.places[number]})" if self.places else f"rank {number}"

    def check_all_there(self, verb: str) -> None:
        """Raises PeerLostError if a worker of the group is known to have ended."""
        gone = self.ended(self.numbers)
        if gone:
            raise PeerLostError(f"`{verb}` on {self.own}: {self.placed_all(gone)} has ended.")

    def ended(self, numbers: Iterable[int]) -> list[int]:
        """Those of them that are known to have ended."""
        return [
            number for number in numbers if self.places and self._has_ended(self.places[number])
        ]

    def placed_all(self, numbers: Iterable[int]) -> str:
        """Several ranks, for messages, and where they run."""
        return ", ".join(map(self.placed, numbers))

    def part(self, ranks: Sequence[int], rank: int) -> "RankNames":
        """Of a group of some of these ranks, in their order there; this one has `rank` there."""
        numbers = [self.numbers[r] for r in ranks]
        return RankNames(
            numbers, rank, self.size, self._store, self.places, self.activity, self._has_ended
        )

    def report_stuck(self, verb: str) -> None:
        """Tells the others in which call this rank failed."""
        numbers = self.numbers if len(self.numbers) < self.size else ()
        if self._store is not None and not self.has_left:
            with suppress(RuntimeError):
                text = json.dumps([verb, self.last_call, numbers])
                self._store.set(_key(self.number), text)

    def withdraw_report(self) -> None:
        """Tells the others that this rank goes on."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.delete_key(_key(self.number))

    def report_of(self, number: int) -> StuckReport | None:
        """What the rank of that number has left, if anything; RuntimeError if the store is gone."""
        if self._store is None or not self._store.check([_key(number)]):
            return None
        verb, last_call, numbers = json.loads(self._store.get(_key(number)))
        return StuckReport(verb, last_call, tuple(numbers))


@dataclass(frozen=True)
class MissingRanks:
    """Who waits where, and who does not; all by their numbers in the first group.

    Attributes:
        reports: what those who wait report.
        missing: who was asked and has left none.
    """

    reports: Mapping[int, StuckReport]
    missing: Sequence[int]

    def __str__(self) -> str:
        """A sentence or two; empty if nothing was found out.

        >>> reports = {0: StuckReport("barrier", "split"), 2: StuckReport("barrier")}
        >>> print(MissingRanks(reports, [1, 3]))
        Waiting: ranks 0, 2 in `barrier`; missing: ranks 1, 3. Last met: ranks 1, 3 in `split`.
        """
        if not self.reports:
            return ""
        waiting = _by_verb({number: report.verb for number, report in self.reports.items()})
        missing = f"; missing: {listed(self.missing)}" if self.missing else ""
        last_call = _by_verb(self._last_met())
        return f"Waiting: {waiting}{missing}.{f' Last met: {last_call}.' if last_call else ''}"

    def _last_met(self) -> dict[int, str]:
        """Missing rank -> the last call in which one of those who wait has met it."""
        return {
            number: report.last_call
            for number in self.missing
            for report in self.reports.values()
            if report.last_call and (not report.numbers or number in report.numbers)
        }


def find_missing_ranks(names: RankNames, verb: str, grace_s: float = _GRACE_S) -> MissingRanks:
    """Who waits, and who does not, when this rank's call has failed.

    The store's server may be what failed, and asking it may hang: a thread asks.

    Args:
        names: of the call's group.
        verb: the call.
        grace_s: how long to wait for ranks that fail for the same reason.
    """
    reports: dict[int, StuckReport] = {}
    missing: set[int] = set()

    def ask() -> None:
        names.report_stuck(verb)
        deadline = time.monotonic() + grace_s
        with suppress(RuntimeError):
            while time.monotonic() < deadline:
                asked = _concerned(names, reports)
                for number in sorted(asked - reports.keys()):
                    report = names.report_of(number)
                    if report is None:
                        missing.add(number)
                    else:
                        reports[number] = report
                if _concerned(names, reports) == reports.keys():
                    return
                time.sleep(_POLL_S)

    with suppress(CollectiveTimeoutError):
        ThreadWork.start(ask, "missing").wait(2 * _GRACE_S)
    found = dict(reports)
    return MissingRanks(found, sorted(missing.copy() - found.keys()))


def who_left(names: RankNames, verb: str) -> str:
    """Who closed the connection that this rank's call needed, for messages.

    A rank that fails in a call because another one has left says so first, and ends later.

    Args:
        names: of the call's group.
        verb: the call.
    """
    names.report_stuck(verb)
    left = [number for number in names.numbers if number != names.number]
    if len(left) > 1:
        gone = names.ended(left)
        # Those who wait for this rank in turn hear of it only when it leaves: don't let them wait.
        missing = find_missing_ranks(names, verb, _MOMENT_S).missing or left  # if none answers
        left = [n for n in gone if n in missing] or names.ended(missing) or list(missing)
    shown = first_few(list(map(names.placed, left)), _MOST)
    return f"one of {shown}" if len(left) > 1 else shown or "another rank"


def _concerned(names: RankNames, reports: Mapping[int, StuckReport]) -> set[int]:
    """The ranks of the groups in which someone waits."""
    groups = [names.numbers, *(report.numbers for report in reports.values())]
    return {number for group in groups for number in group or range(names.size)}


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
    shown = first_few(list(map(str, ranks)), _MOST)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _key(number: int) -> str:
    return f"allstep/stuck/{number}"
