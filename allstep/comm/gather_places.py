"""Waits for all workers of a launch and tells each where the others run, or what is wrong.

[Note: who has come] Each worker writes to the store its rank, its place and what its launcher told
it. Rank 0 reads these claims and writes the outcome, for which the others wait: every rank's place,
or an error. A worker that waits too long, or whose rank is taken already, writes an error; the
first outcome in the store counts for all. So no worker goes on with too few workers, with too many,
or with another job's.
"""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from allstep import errors
from allstep.comm.failures import is_timeout
from allstep.comm.missing import listed
from allstep.comm.places import Place
from allstep.env import Launch
from allstep.errors import CollectiveTimeoutError, DisagreementError, PeerLostError

NOTICE_S = 10.0  # duration of a wait after which a message says so
_POLL_S = 0.02
_NUM_WRITTEN = "num_written"
_OUTCOME = "outcome"
_MOST = 8  # largest number of workers that an error names
_logger = logging.getLogger("allstep")


@dataclass(frozen=True)
class _Claim:
    """What a worker says about itself.

    Attributes:
        rank: its rank.
        size: the number of workers that its launcher gave it.
        job: the job's id that its launcher gave it; empty if the launcher gives none.
        place: where it runs.
    """

    rank: int
    size: int
    job: str
    place: Place

    @classmethod
    def of(cls, launch: Launch, place: Place) -> "_Claim":
        # With other launchers, ids may be derived from a node's processes and so differ by node.
        is_told = launch.launcher in ("torchrun", "slurm")
        return cls(launch.rank, launch.size, launch.job_id if is_told else "", place)

    @classmethod
    def read(cls, store: Store, rank: int) -> "_Claim":
        plain = json.loads(store.get(_key(rank)))
        return cls(**(plain | {"place": Place(**plain["place"])}))


@dataclass(frozen=True)
class _Outcome:
    """The outcome of the meeting.

    Attributes:
        places: places of all workers, by rank.
        error: what is wrong; empty if nothing is.
        kind: name of the error's class.
    """

    places: Sequence[Sequence[Any]] = ()
    error: str = ""
    kind: str = DisagreementError.__name__


def gather_places(
    store: Store,
    launch: Launch,
    place: Place,
    deadline_s: float,
    timeout_s: float,
    notice_s: float = NOTICE_S,
) -> list[Place]:
    """Waits for all workers of a launch; returns where they run, by rank. [Note: who has come]

    Args:
        store: a store for this meeting only.
        launch: this worker's launch.
        place: where this worker runs.
        deadline_s: the deadline, by `time.monotonic()`.
        timeout_s: the timeout that errors name.
        notice_s: time between two messages of rank 0 about the ranks that it waits for.

    Raises:
        CollectiveTimeoutError: if not all have come by the deadline; names the missing ranks.
        DisagreementError: if workers have different sizes or jobs, or the same rank.
        PeerLostError: if a worker came and then ended.
    """
    own = _Claim.of(launch, place)
    if store.add(f"came/{launch.rank}", 1) > 1:
        outcome = _Outcome(error=_two(store, own))
        _publish(store, outcome)
    else:
        store.set(_key(launch.rank), json.dumps(asdict(own)))
        store.add(_NUM_WRITTEN, 1)
        outcome = _wait_for_outcome(store, launch, own, deadline_s, timeout_s, notice_s)
    if not outcome.error:
        outcome = replace(outcome, error=_difference(_Claim.read(store, 0), own))
    if outcome.error:
        where = f"`init` on rank {launch.rank} of {launch.size}"
        raise getattr(errors, outcome.kind)(f"{where}: {outcome.error}")
    return [Place(*place) for place in outcome.places]


def _wait_for_outcome(
    store: Store,
    launch: Launch,
    own: _Claim,
    deadline_s: float,
    timeout_s: float,
    notice_s: float,
) -> _Outcome:
    """The outcome of the meeting, or this worker's own if it is the first to write one."""
    outcome = None
    if launch.rank == 0:
        outcome = _collect(store, launch.size, own, deadline_s, notice_s)
    elif _has_come(store, _OUTCOME, deadline_s):
        return _Outcome(**json.loads(store.get(_OUTCOME)))
    return _publish(store, outcome or _late(store, launch.size, timeout_s))


def _publish(store: Store, outcome: _Outcome) -> _Outcome:
    """Writes the outcome, unless there is one already; returns the one that counts."""
    text = store.compare_set(_OUTCOME, "", json.dumps(asdict(outcome)))
    return _Outcome(**json.loads(text))


def _collect(
    store: Store, size: int, own: _Claim, deadline_s: float, notice_s: float
) -> _Outcome | None:
    """Collects all claims on rank 0; None after the deadline or another worker's outcome."""
    claims = {0: own}
    num_seen = num_notices = 0
    start_s = time.monotonic()
    while len(claims) < size:
        num_written = store.add(_NUM_WRITTEN, 0)
        news = set(range(size)) - claims.keys() if num_written > num_seen else set()
        for rank in _came(store, news):
            claims[rank] = _Claim.read(store, rank)
            difference = _difference(own, claims[rank])
            if difference:
                return _Outcome(error=difference)
        num_seen = num_written
        if len(claims) == size:
            break
        if store.check([_OUTCOME]) or time.monotonic() >= deadline_s:
            return None
        for rank, claim in claims.items():
            if claim.place.has_ended():
                return _Outcome(
                    error=f"rank {rank} ({claim.place}) came, and ended before the others came. "
                    "See what it failed at, and start all again.",
                    kind=PeerLostError.__name__,
                )
        if time.monotonic() - start_s >= (num_notices + 1) * notice_s:
            num_notices += 1
            missing = listed([rank for rank in range(size) if rank not in claims])
            hosts = sorted({claim.place.host for claim in claims.values()})
            _logger.warning(
                "`init` has waited %g s for %s; %d of %d workers came, on %s",
                num_notices * notice_s,
                missing,
                len(claims),
                size,
                ", ".join(hosts[:_MOST]),
            )
        time.sleep(_POLL_S)  # a store's wait would print a warning at each timeout
    return _Outcome(places=[astuple(claims[rank].place) for rank in range(size)])


def _difference(one: _Claim, other: _Claim) -> str:
    """Why two workers don't belong together; empty if they do."""
    who, whom = f"rank {other.rank} ({other.place})", f"rank {one.rank} ({one.place})"
    if one.size != other.size:
        return (
            f"{who} was told that there are {other.size} workers, {whom} that there are "
            f"{one.size}; start all with the same number (torchrun's WORLD_SIZE)."
        )
    if one.job != other.job:
        return (
            f"{who} belongs to job {other.job!r}, {whom} to job {one.job!r}: both use one port; "
            "set MASTER_PORT to another one for all workers of a job."
        )
    return ""


def _two(store: Store, second: _Claim) -> str:
    places = f"{_Claim.read(store, second.rank).place} and {second.place}"
    return (
        f"two workers say that they are rank {second.rank}: {places}. Give each worker a rank of "
        "its own; where one that failed was started again, start all again."
    )


def _late(store: Store, size: int, timeout_s: float) -> _Outcome:
    """The outcome that names the workers that have not come."""
    came = _came(store, range(size))
    missing = [rank for rank in range(size) if rank not in came]
    there = [f"rank {rank} ({_Claim.read(store, rank).place})" for rank in came[:_MOST]]
    there += ["..."] if len(came) > _MOST else []
    if missing:
        what = f"{listed(missing)} did not come within {timeout_s:g} s; there: {', '.join(there)}"
    else:
        what = f"{there[0]} came, but did not go on within {timeout_s:g} s"
    return _Outcome(
        error=f"{what}. See what it failed at or waits for, or raise `timeout_s`.",
        kind=CollectiveTimeoutError.__name__,
    )


def _has_come(store: Store, key: str, deadline_s: float) -> bool:
    """Waits for a key; returns whether it came in time."""
    remaining_s = max(deadline_s - time.monotonic(), _POLL_S)
    try:
        store.wait([key], timedelta(seconds=remaining_s))
    except RuntimeError as error:
        if not is_timeout(error):
            raise
        return False
    return True


def _came(store: Store, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if store.check([_key(rank)])]


def _key(rank: int) -> str:
    return f"rank/{rank}"
