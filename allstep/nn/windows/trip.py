"""One crossing of the network: what a fetch or a delivery sends, and what it makes of it."""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from allstep.comm import Work
from allstep.comm.work import CompletedWork
from allstep.nn.windows.grid import Grid
from allstep.nn.windows.plan import FetchPlan, FetchStats
from allstep.nn.windows.window import Window

__all__ = ["Trip"]


class Trip:
    """The messages of one `fetch` or `deliver`, and of its way back; see [Note: halo].

    Args:
        grid: the workers.
        plan: this worker's part.
        dims: the dims of the tensors that are the array's.
        pieces: the parts of the input window that are tensors here.
    """

    def __init__(
        self, grid: Grid, plan: FetchPlan, dims: Sequence[int], pieces: Sequence[Window]
    ) -> None:
        self.fill = 0.0
        self.back: Trip | None = None
        self._grid = grid
        self._plan = plan
        self._dims = tuple(dims)
        self._pieces = tuple(pieces)
        self._verb = ""
        self.arrivals: Work[dict[int, Tensor]] = CompletedWork({})

    def reversed(self, verb: str) -> "Trip":
        """A new trip the other way, whose messages errors call `verb`."""
        trip = Trip(self._grid, self._plan, self._dims, self._pieces)
        trip._verb = verb
        return trip

    def zeros(self, like: Tensor) -> tuple[Tensor, ...]:
        """Pieces of zeros."""
        return tuple(like.new_zeros(self._shape(like, piece)) for piece in self._pieces)

    def send_own(self, x: Tensor, verb: str) -> None:
        """Posts what the others want of this worker's window, and the room for what it wants."""
        plan = self._plan
        sends = {p.peer: self._part(x, plan.own, p.window) for p in plan.sends}
        self._post(x, sends, {p.peer: p.window for p in plan.receives}, verb)

    def assemble(self, local: Tensor) -> tuple[Tensor, ...]:
        """The pieces, of what is here, what came and padding."""
        plan = self._plan
        parts = [(plan.own, local)]
        arrived = self.arrivals.wait()
        parts += [(parcel.window, arrived[parcel.peer]) for parcel in plan.receives]
        return tuple(self._assemble(piece, parts, local) for piece in self._pieces)

    def _assemble(
        self, piece: Window, parts: Sequence[tuple[Window, Tensor]], like: Tensor
    ) -> Tensor:
        shared = [(window.intersect(piece), window, x) for window, x in parts]
        covered = sum(both.num_positions for both, _, _ in shared)
        tensor = like.new_empty(self._shape(like, piece))
        if covered < piece.num_positions:
            tensor.fill_(self.fill)
        for both, window, x in shared:
            if both.num_positions:
                self._part(tensor, piece, both).copy_(self._part(x, window, both))
        return tensor

    def send_home(self, xs: Sequence[Tensor], verb: str) -> Tensor:
        """Posts what the pieces add to others' windows; returns what they add to this one's."""
        plan = self._plan
        sends = {p.peer: self._total(p.window, xs) for p in plan.receives}
        self._post(xs[0], sends, {p.peer: p.window for p in plan.sends}, verb)
        return self._total(plan.own, xs)

    def _total(self, window: Window, xs: Sequence[Tensor]) -> Tensor:
        """The sum of the pieces in a window."""
        total = xs[0].new_zeros(self._shape(xs[0], window))
        for piece, x in zip(self._pieces, xs, strict=True):
            both = piece.intersect(window)
            if both.num_positions:
                self._part(total, window, both).add_(self._part(x, piece, both))
        return total

    def add_arrived(self, kept: Tensor) -> Tensor:
        """What this worker has of its window's sum, and what the others sent, by rank."""
        plan = self._plan
        arrived = self.arrivals.wait()
        total = kept.clone()
        for parcel in plan.sends:
            self._part(total, plan.own, parcel.window).add_(arrived[parcel.peer])
        return total

    def _post(
        self, like: Tensor, sends: dict[int, Tensor], receives: dict[int, Window], verb: str
    ) -> None:
        """Posts all messages and counts them."""
        self.arrivals = self._grid.parcels.exchange(
            sends,
            {peer: self._shape(like, window) for peer, window in receives.items()},
            dtype=like.dtype,
            device=like.device,
            verb=self._verb or verb,
        )
        received = [self._shape(like, window) for window in receives.values()]
        self._grid.stats += FetchStats(
            len(sends),
            like.itemsize * sum(x.numel() for x in sends.values()),
            len(receives),
            like.itemsize * sum(prod(shape) for shape in received),
        )

    def _shape(self, like: Tensor, window: Window) -> list[int]:
        """A tensor's shape with a window's in place of its array's dims."""
        first, last = self._dims[0], self._dims[-1]
        return [*like.shape[:first], *window.shape, *like.shape[last + 1 :]]

    def _part(self, x: Tensor, held: Window, window: Window) -> Tensor:
        """A view of a window in a tensor that holds a larger one."""
        return x[(slice(None),) * self._dims[0] + window.slices(held)]
