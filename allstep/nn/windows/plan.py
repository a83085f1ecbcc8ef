"""What travels between whom when each worker gathers its input window, without sending it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from allstep.errors import UsageError
from allstep.nn.windows.window import Layout, Window


@dataclass(frozen=True)
class Slice:
    """A part of the array that another worker gets, or has."""

    peer: int
    window: Window


@dataclass
class HaloStats:
    """Messages of one worker.

    >>> HaloStats(1, 8) + HaloStats(messages_received=2, bytes_received=5)
    HaloStats(messages_sent=1, bytes_sent=8, messages_received=2, bytes_received=5)
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0

    def __add__(self, other: "HaloStats") -> "HaloStats":
        return HaloStats(
            self.messages_sent + other.messages_sent,
            self.bytes_sent + other.bytes_sent,
            self.messages_received + other.messages_received,
            self.bytes_received + other.bytes_received,
        )


@dataclass(frozen=True)
class HaloPlan:
    """One worker's part in a `halo_gather`; see [Note: halo] in halo.py.

    Attributes:
        own: its output window.
        sends: what of `own` the others want.
        receives: what of its input window the others have.
    """

    own: Window
    sends: tuple[Slice, ...]
    receives: tuple[Slice, ...]

    def stats(self, position_bytes: int) -> HaloStats:
        """The messages of a `halo_gather`.

        Args:
            position_bytes: size of what the array has at one position.
        """
        return HaloStats(
            len(self.sends),
            position_bytes * sum(part.window.num_positions for part in self.sends),
            len(self.receives),
            position_bytes * sum(part.window.num_positions for part in self.receives),
        )


@lru_cache(maxsize=1024)
def plan_halo(layout: Layout, input_windows: tuple[Window, ...], rank: int) -> HaloPlan:
    """What one worker sends and receives: the intersections, nothing else.

    Args:
        layout: who owns what.
        input_windows: what each worker wants, by rank; what lies outside of the array is padding.
        rank: the worker.

    Raises:
        UsageError: if there is not one window of the array's number of dims for each worker.

    >>> layout = Layout.split((10,), (2,))
    >>> plan_halo(layout, (Window((-1,), (6,)), Window((4,), (11,))), 0)
    HaloPlan(own=Window(start=(0,), stop=(5,)),
              sends=(Slice(peer=1, window=Window(start=(4,), stop=(5,))),),
              receives=(Slice(peer=1, window=Window(start=(5,), stop=(6,))),))
    """
    check_input_windows(layout, input_windows)
    own, wanted = layout.windows[rank], input_windows[rank]
    peers = [peer for peer in range(len(input_windows)) if peer != rank]
    sends = [Slice(peer, own.intersect(input_windows[peer])) for peer in peers]
    receives = [Slice(peer, layout.windows[peer].intersect(wanted)) for peer in peers]
    return HaloPlan(own, _not_empty(sends), _not_empty(receives))


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


def _not_empty(parts: list[Slice]) -> tuple[Slice, ...]:
    return tuple(part for part in parts if part.window.num_positions)
