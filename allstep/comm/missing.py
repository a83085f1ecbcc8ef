"""Which ranks are missing when a call has failed, and what errors call them.

[Note: rank names] A group that `split` makes counts its ranks from 0 again. Users who look for a
missing rank know the numbers in the first group, which `init` made, so errors give these, whatever
group a call belongs to.

[Note: stuck reports] A rank whose call fails writes a report to the first group's store, where all
can read it. A rank may be missing because it waits in another group, for a rank that is only in
that group. So `find_missing_ranks` looks for reports of its own group's ranks, then of the ranks of
the groups in which these wait, and so on. The ranks without a report are the missing ones.
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

_GRACE_S = 0.5  # ranks that wait for the same rank fail within this time of each other
_MOMENT_S = 0.05
_POLL_S = 0.02
_MOST = 8  # largest number of ranks that an error names


@dataclass(frozen=True)
class StuckReport:
    """The report of a rank whose call failed.

    Attributes:
        verb: name of the call.
        last_call: the last call in which all ranks of its group have met; empty if there was none.
        numbers: numbers of the group's ranks; empty for all ranks.
    """

    verb: str
    last_call: str = ""
    numbers: tuple[int, ...] = ()


class RankNames:
    """The ranks of a group by their numbers in the first group. [Note: rank names]

    Args:
        numbers: rank -> number in the first group.
        rank: this rank in the group.
        size: size of the first group.
        store: store of the first group; None for a single process.
        places: number -> where that rank runs; empty if unknown.
        activity: this worker's activity; a new one if None.
        has_ended: place -> whether the process there is known to have ended.

    Attributes:
        own: this rank, for messages.
        last_call: the last call that ended here and that all ranks of the group must make.
        is_interrupted: whether this process has closed the group's connections by itself, because
            it knows that a rank is lost.
        has_left: whether this rank has left the group; then calls that fail for that reason are not
            reported.

    >>> RankNames(range(4), 2, 4).subgroup([2, 3], 0).own
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
        """The names of a first group's ranks."""
        size = group.size()
        return cls(range(size), group.rank(), size, group.get_group_store(), places)

    def named(self, rank: int) -> str:
        """A rank of this group, for messages.

        >>> RankNames([2, 3], 0, 4).named(1)
        'rank 3'
        """
        return f"rank {self.numbers[rank]}"

    def placed(self, number: int) -> str:
        """A rank, given by its number, and where it runs, if that is known; for messages.

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
        """The numbers among `numbers` whose ranks are known to have ended."""
        return [
            number for number in numbers if self.places and self._has_ended(self.places[number])
        ]

    def placed_all(self, numbers: Iterable[int]) -> str:
        """Several ranks and where they run, for messages."""
        return ", ".join(map(self.placed, numbers))

    def subgroup(self, ranks: Sequence[int], rank: int) -> "RankNames":
        """The names for a group of `ranks`, in this order; `rank` is this worker's rank there."""
        numbers = [self.numbers[r] for r in ranks]
        return RankNames(
            numbers, rank, self.size, self._store, self.places, self.activity, self._has_ended
        )

    def report_stuck(self, verb: str) -> None:
        """Reports to the others in which call this rank failed."""
        numbers = self.numbers if len(self.numbers) < self.size else ()
        if self._store is not None and not self.has_left:
            with suppress(RuntimeError):
                text = json.dumps([verb, self.last_call, numbers])
                self._store.set(_key(self.number), text)

    def withdraw_report(self) -> None:
        """Removes this rank's report, as it goes on."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.delete_key(_key(self.number))

    def report_of(self, number: int) -> StuckReport | None:
        """The report of a rank, by its number, if any; RuntimeError if the store is gone."""
        if self._store is None or not self._store.check([_key(number)]):
            return None
        verb, last_call, numbers = json.loads(self._store.get(_key(number)))
        return StuckReport(verb, last_call, tuple(numbers))


@dataclass(frozen=True)
class MissingRanks:
    """Ranks that wait, and ranks that are missing, by their numbers in the first group.

    Attributes:
        reports: number -> report of each rank that waits.
        missing: numbers of the ranks without a report.
    """

    reports: Mapping[int, StuckReport]
    missing: Sequence[int]

    def __str__(self) -> str:
        """One or two sentences; empty if no rank has left a report.

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
        """Missing rank -> the last call in which a waiting rank has met it."""
        return {
            number: report.last_call
            for number in self.missing
            for report in self.reports.values()
            if report.last_call and (not report.numbers or number in report.numbers)
        }


def find_missing_ranks(names: RankNames, verb: str, grace_s: float = _GRACE_S) -> MissingRanks:
    """Finds the ranks that wait and those that are missing, after this rank's call has failed.

    A thread reads the store, because the store's server may have failed, so that a read hangs.

    Args:
        names: names of the ranks of the call's group.
        verb: name of the call.
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
    """The rank that closed the connection that this rank's call needed, for messages.

    A rank that fails because another one has left writes its report before it ends, so a rank
    without a report is likelier to have left first.

    Args:
        names: names of the ranks of the call's group.
        verb: name of the call.
    """
    names.report_stuck(verb)
    left = [number for number in names.numbers if number != names.number]
    if len(left) > 1:
        gone = names.ended(left)
        # Ranks that wait for this one learn of the loss only when it leaves, so this must be quick.
        missing = find_missing_ranks(names, verb, _MOMENT_S).missing or left  # if it finds none
        left = [n for n in gone if n in missing] or names.ended(missing) or list(missing)
    shown = first_few(list(map(names.placed, left)), _MOST)
    return f"one of {shown}" if len(left) > 1 else shown or "another rank"


def _concerned(names: RankNames, reports: Mapping[int, StuckReport]) -> set[int]:
    """Numbers of the ranks of all groups in which a rank waits."""
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
    shown = first_few(ranks, _MOST)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _key(number: int) -> str:
    return f"allstep/stuck/{number}"
