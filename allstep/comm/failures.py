"""Turns what a backend says about a failed call into allstep's typed errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from allstep.errors import CollectiveTimeoutError, CommunicationError, PeerLostError

_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "pair closure",
    "pair is not connected",
    "remote process exited",
    "was aborted",
    "communicator was abort",
    "socketprogress",
)
_TIMED_OUT = ("timed out", "timeout")


@contextmanager
def translated(verb: str, rank: int, size: int, timeout_s: float) -> Iterator[None]:
    """Raises PeerLostError or CollectiveTimeoutError for a backend's own error inside."""
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:  # torch's DistError is one too
        where = f"`{verb}` on rank {rank} of {size}"
        if is_peer_lost(error):
            raise PeerLostError(
                f"{where}: another rank closed its connection; it failed, timed out or was "
                f"stopped. Look for the first error among the other ranks. ({_gist(error)})"
            ) from error
        if is_timeout(error):
            raise CollectiveTimeoutError(
                f"{where} did not finish within {timeout_s:g} s: another rank is slow or never "
                "made this call. Check that all ranks make the same calls in the same order, or "
                "raise `timeout_s`."
            ) from error
        raise


def is_peer_lost(error: RuntimeError) -> bool:
    """Does this say that a connection is gone?"""
    return any(word in str(error).lower() for word in _LOST)


def is_timeout(error: RuntimeError) -> bool:
    """Does this say that a call took too long?"""
    return not is_peer_lost(error) and any(word in str(error).lower() for word in _TIMED_OUT)


def _gist(error: RuntimeError) -> str:
    """The first sentence of a backend's message, without its source file's name."""
    return str(error).rpartition("] ")[2].partition(". ")[0]
