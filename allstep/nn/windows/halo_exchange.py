"""The messages of one halo exchange: what is sent, and what is made of what arrives."""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from allstep.comm import Work
from allstep.comm.work import CompletedWork
from allstep.nn.windows.grid import Grid
from allstep.nn.windows.plan import HaloPlan, HaloStats, Slice
from allstep.nn.windows.window import Window


class HaloExchange:
    """The messages of one `halo_gather` or `halo_scatter_add`; see [Note: halo].

    Args:
        grid: the workers.
        plan: this worker's part.
        dims: the dims of the tensors that are the array's.
        pieces: the parts of the input window that are tensors here.
        verb: what errors call it.
        fill: the value outside of the array.

    Attributes:
        arrivals: the messages to this worker, by the rank that sent them.
        back: the exchange of the backward pass, once that has begun.
    """

    def __init__(
        self,
        grid: Grid,
        plan: HaloPlan,
        dims: Sequence[int],
        pieces: Sequence[Window],
        verb: str,
        fill: float = 0.0,
    ) -> None:
        self.arrivals: Work[dict[int, Tensor]] = CompletedWork({})
        self.back: HaloExchange | None = None
        self._grid = grid
        self._plan = plan
        self._dims = tuple(dims)
        self._pieces = tuple(pieces)
        self._verb = verb
        self._fill = fill

    def reversed(self) -> "HaloExchange":
        """A new exchange the other way."""
        verb = f"backward of {self._verb.removeprefix('backward of ')}"
        return HaloExchange(self._grid, self._plan, self._dims, self._pieces, verb)

    def zeros(self, like: Tensor) -> tuple[Tensor, ...]:
        """Pieces of zeros."""
        return tuple(like.new_zeros(self._shape(like, piece)) for piece in self._pieces)

    def send_own(self, x: Tensor) -> None:
        """Posts what the others want of this worker's window, and buffers for what it wants."""
        plan = self._plan
        sends = {part.peer: self._view(x, plan.own, part.window) for part in plan.sends}
        self._post(x, sends, plan.receives)

    def gather(self, local: Tensor) -> tuple[Tensor, ...]:
        """The pieces, of this worker's window, what arrived and padding."""
        plan = self._plan
        arrived = self.arrivals.wait()
        parts = [(plan.own, local)]
        parts += [(part.window, arrived[part.peer]) for part in plan.receives]
        return tuple(self._assembled(piece, parts, local) for piece in self._pieces)

    def _assembled(
        self, piece: Window, parts: Sequence[tuple[Window, Tensor]], like: Tensor
    ) -> Tensor:
        shared = [(window.intersect(piece), window, x) for window, x in parts]
        covered = sum(both.num_positions for both, _, _ in shared)
        tensor = like.new_empty(self._shape(like, piece))
        if covered < piece.num_positions:
            tensor.fill_(self._fill)
        for both, window, x in shared:
            if both.num_positions:
                self._view(tensor, piece, both).copy_(self._view(x, window, both))
        return tensor

    def send_contributions(self, xs: Sequence[Tensor]) -> Tensor:
        """Posts what the pieces add to others' windows; returns what they add to this one's."""
        plan = self._plan
        sends = {part.peer: self._total(part.window, xs) for part in plan.receives}
        self._post(xs[0], sends, plan.sends)
        return self._total(plan.own, xs)

    def _total(self, window: Window, xs: Sequence[Tensor]) -> Tensor:
        """The sum of the pieces in a window."""
        total = xs[0].new_zeros(self._shape(xs[0], window))
        for piece, x in zip(self._pieces, xs, strict=True):
            both = piece.intersect(window)
            if both.num_positions:
                self._view(total, window, both).add_(self._view(x, piece, both))
        return total

    def add(self, kept: Tensor) -> Tensor:
        """This worker's part of the sum plus what the others sent, by rank."""
        arrived = self.arrivals.wait()
        total = kept.clone()
        for part in self._plan.sends:
            self._view(total, self._plan.own, part.window).add_(arrived[part.peer])
        return total

    def _post(self, like: Tensor, sends: dict[int, Tensor], receives: Sequence[Slice]) -> None:
        """Posts all messages and counts them."""
        shapes = {part.peer: self._shape(like, part.window) for part in receives}
        self.arrivals = self._grid.parcels.exchange(
            sends, shapes, dtype=like.dtype, device=like.device, verb=self._verb
        )
        self._grid.stats += HaloStats(
            len(sends),
            like.itemsize * sum(x.numel() for x in sends.values()),
            len(receives),
            like.itemsize * sum(map(prod, shapes.values())),
        )

    def _shape(self, like: Tensor, window: Window) -> list[int]:
        """A tensor's shape with a window's in place of its array's dims."""
        first, last = self._dims[0], self._dims[-1]
        return [*like.shape[:first], *window.shape, *like.shape[last + 1 :]]

    def _view(self, x: Tensor, held: Window, window: Window) -> Tensor:
        return window.view(x, held, self._dims[0])
