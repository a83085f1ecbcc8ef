"""On paper: what travels between whom when each worker fetches its input window."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from allstep.errors import UsageError
from allstep.nn.windows.window import Layout, Window

__all__ = ["FetchPlan", "FetchStats", "Parcel", "plan_fetch"]


@dataclass(frozen=True)
class Parcel:
    """A part of the array that another worker gets, or has."""

    peer: int
    window: Window


@dataclass
class FetchStats:
    """Messages of one worker.

    >>> FetchStats(1, 8) + FetchStats(messages_received=2, bytes_received=5)
    FetchStats(messages_sent=1, bytes_sent=8, messages_received=2, bytes_received=5)
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0

    def __add__(self, other: "FetchStats") -> "FetchStats":
        return FetchStats(
            self.messages_sent + other.messages_sent,
            self.bytes_sent + other.bytes_sent,
            self.messages_received + other.messages_received,
            self.bytes_received + other.bytes_received,
        )

    def mirrored(self) -> "FetchStats":
        """Those of the way back: what was sent is received.

        >>> FetchStats(1, 8).mirrored()
        FetchStats(messages_sent=0, bytes_sent=0, messages_received=1, bytes_received=8)
        """
        return FetchStats(
            self.messages_received, self.bytes_received, self.messages_sent, self.bytes_sent
        )


@dataclass(frozen=True)
class FetchPlan:
    """One worker's part in a fetch; see [Note: halo] in fetch.py.

    Attributes:
        own: its output window.
        wanted: its input window.
        sends: what of `own` the others want.
        receives: what of `wanted` the others have.
    """

    own: Window
    wanted: Window
    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]

    def stats(self, position_bytes: int) -> FetchStats:
        """The messages of a fetch.

        Args:
            position_bytes: size of what the array has at one position.
        """
        return FetchStats(
            len(self.sends),
            position_bytes * sum(parcel.window.num_positions for parcel in self.sends),
            len(self.receives),
            position_bytes * sum(parcel.window.num_positions for parcel in self.receives),
        )


@lru_cache(maxsize=1024)
def plan_fetch(layout: Layout, input_windows: tuple[Window, ...], rank: int) -> FetchPlan:
    """What one worker sends and receives: the intersections, nothing else.

    Args:
        layout: who owns what.
        input_windows: what each worker wants, by rank; what lies outside of the array is padding.
        rank: the worker.

    Raises:
        UsageError: if there is not one window of the array's number of dims for each worker.

    >>> layout = Layout.split((10,), (2,))
    >>> plan_fetch(layout, (Window((-1,), (6,)), Window((4,), (11,))), 0)
    FetchPlan(own=Window(start=(0,), stop=(5,)), wanted=Window(start=(-1,), stop=(6,)),
              sends=(Parcel(peer=1, window=Window(start=(4,), stop=(5,))),),
              receives=(Parcel(peer=1, window=Window(start=(5,), stop=(6,))),))
    """
    check_input_windows(layout, input_windows)
    own, wanted = layout.windows[rank], input_windows[rank]
    peers = [peer for peer in range(len(input_windows)) if peer != rank]
    sends = [Parcel(peer, own.intersect(input_windows[peer])) for peer in peers]
    receives = [Parcel(peer, layout.windows[peer].intersect(wanted)) for peer in peers]
    return FetchPlan(own, wanted, _not_empty(sends), _not_empty(receives))


def check_input_windows(layout: Layout, input_windows: Sequence[Window]) -> None:
    """Raises UsageError unless there is one window of the right number of dims for each worker."""
    if len(input_windows) != len(layout.windows):
        raise UsageError(
            f"`input_windows` has {len(input_windows)} windows for {len(layout.windows)} workers; "
            "pass one for each."
        )
    for rank, window in enumerate(input_windows):
        if len(window.shape) != len(layout.shape):
            raise UsageError(
                f"`input_windows[{rank}]` (={window}) has {len(window.shape)} dims, the array "
                f"{len(layout.shape)}."
            )


def _not_empty(parcels: list[Parcel]) -> tuple[Parcel, ...]:
    return tuple(parcel for parcel in parcels if parcel.window.num_positions)
