"""Turns a backend's errors about failed calls into allstep's typed errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from allstep.comm.missing import RankNames, find_missing_ranks, who_left
from allstep.device import Event, wait_until
from allstep.errors import CollectiveTimeoutError, CommunicationError, PeerLostError

_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "pair is not connected",
    "remote process exited",
    "was aborted",
    "communicator was abort",
    "socketprogress",
)
START_AGAIN = (
    "See its first error, then start all workers again; a run that keeps checkpoints goes on from "
    "the newest."
)
_TIMED_OUT = ("timed out", "timeout")


@contextmanager
def translated(verb: str, rank: int, size: int, timeout_s: float) -> Iterator[None]:
    """Raises PeerLostError or CollectiveTimeoutError in place of a backend's error inside."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError is a subclass
        typed = _translation(error, verb, rank, size, timeout_s)
        if typed is None:
            raise
        raise typed from error


def _translation(
    error: RuntimeError, verb: str, rank: int, size: int, timeout_s: float
) -> PeerLostError | CollectiveTimeoutError | None:
    """The typed error for a backend's error; None if it is typed already, or not a backend's."""
    if isinstance(error, CommunicationError):
        return None
    where = f"`{verb}` on rank {rank} of {size}"
    if is_peer_lost(error):
        return PeerLostError(
            f"{where}: another rank closed its connection; it failed, timed out or was "
            f"stopped. Look for the first error among the other ranks. ({_gist(error)})"
        )
    if is_timeout(error):
        return CollectiveTimeoutError(
            f"{where} did not finish within {timeout_s:g} s: another rank is slow or never "
            "made this call. Check that all ranks make the same calls in the same order, or "
            "raise `timeout_s`."
        )
    return None


class explained:  # noqa: N801 (called as a function; each call of a step enters two)
    """A context that turns errors inside into typed ones, which say which ranks are missing.

    Args:
        verb: name of the call.
        names: names of its group's ranks.
        timeout_s: timeout of the call.
        is_final: whether the caller does not wait again after a timeout.
    """

    __slots__ = ("_call", "_is_final", "_names", "_timeout_s", "_verb")

    def __init__(
        self, verb: str, names: RankNames, timeout_s: float, *, is_final: bool = True
    ) -> None:
        self._verb, self._names = verb, names
        self._timeout_s, self._is_final = timeout_s, is_final
        self._call = names.activity.call(verb)

    def __enter__(self) -> None:
        self._call.__enter__()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, RuntimeError):
            self._call.__exit__()
            return
        try:
            better, cause = self._better(error)
        finally:  # the search for missing ranks still counts as part of the call
            self._call.__exit__()
        try:
            if better is not error:
                raise better from cause
        finally:
            del better, error  # an error whose traceback refers to itself would keep the group

    def _better(self, error: RuntimeError) -> tuple[RuntimeError, BaseException | None]:
        """The error to raise instead, and its cause; the same error if there is no better one."""
        names, verb, cause = self._names, self._verb, error.__cause__
        typed = _translation(error, verb, names.number, names.size, self._timeout_s)
        if typed is not None:
            error, cause = typed, error
        if isinstance(error, PeerLostError):
            return _left(names, verb, cause), cause
        if not isinstance(error, CollectiveTimeoutError):
            return error, cause
        if names.is_interrupted:  # Gloo reports it as a timeout
            return _left(names, verb, cause), cause
        if not self._is_final:
            return error, cause
        missing = find_missing_ranks(names, verb)
        ended = names.ended(missing.missing)
        if ended:  # its end was not noticed in time: a machine may have hung
            where = f"`{verb}` on {names.own}: {names.placed_all(ended)}"
            return PeerLostError(f"{where} has ended. {START_AGAIN}"), cause
        return CollectiveTimeoutError(f"{error} {missing}".rstrip()), cause


def loss_told_by_torch(error: BaseException | None, names: RankNames) -> PeerLostError | None:
    """The error that names the lost rank, if a call of torch's own (as a DTensor's) lost one.

    Args:
        error: any error.
        names: names of the first group's ranks.

    Returns:
        None for an error of any other kind.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
        return None
    is_of_backend = isinstance(error, dist.DistError) or "gloo/" in str(error)
    if not is_of_backend or not is_peer_lost(error):
        return None
    return _left(names, "torch.distributed", error, "A call of torch.distributed")


def _left(
    names: RankNames, verb: str, cause: BaseException | None, call: str = ""
) -> PeerLostError:
    """The error that names the rank that closed its connection, in the call `call` or `verb`."""
    who = who_left(names, verb)
    gist = f" ({_gist(cause)})" if isinstance(cause, RuntimeError) else ""
    return PeerLostError(
        f"{call or f'`{verb}`'} on {names.own}: {who} closed its connection; it failed, timed out"
        f" or was stopped. {START_AGAIN}{gist}"
    )


def wait_for_event(event: Event, verb: str, names: RankNames, timeout_s: float) -> None:
    """Makes the host wait for a call on an accelerator, which never ends if ranks are missing.

    Args:
        event: an event behind the call's work.
        verb: name of the call.
        names: names of its group's ranks.
        timeout_s: longest time to wait.

    Raises:
        CollectiveTimeoutError: if the event is not reached in time; names the missing ranks.
    """
    with names.activity.call(verb):
        has_come = wait_until(event, timeout_s)
    if not has_come:
        with explained(verb, names, timeout_s):
            raise RuntimeError("the device's event timed out")


def is_peer_lost(error: RuntimeError) -> bool:
    """Whether a backend's error says that a connection is gone."""
    return any(word in str(error).lower() for word in _LOST)


def is_timeout(error: RuntimeError) -> bool:
    """Whether a backend's error says that a call took too long.

    Gloo's "Application timeout caused pair closure" counts: once a call has timed out, Gloo ends
    all other calls of the process with it, whichever is waited for first. `interrupt` and `abort`
    have the same effect.
    """
    return not is_peer_lost(error) and any(word in str(error).lower() for word in _TIMED_OUT)


def _gist(error: RuntimeError) -> str:
    """The first sentence of a backend's message, without its source file's name."""
    return str(error).rpartition("] ")[2].partition(". ")[0]
