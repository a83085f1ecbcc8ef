"""Gives each worker its input window of an array of which each owns a part.

[Note: halo] An array is split over workers; each owns its output window. To compute the next
array's part a worker needs its input window: what its receptive fields see, in the same global
coordinates. The two overlap with other workers', so `fetch` sends every worker the intersections
of its input window with the others' output windows, one message each, and nothing else; what lies
outside of the array is padding. Its backward is `deliver`: the gradient of each intersection goes
home and is added to the owner's. The backward of `deliver` is `fetch`.

[Note: overlap] Both come in two phases. `start_fetch` posts all messages and gives x back;
what needs no neighbour is computed from that x; `wait` gives the rest. Autograd runs backward in
reversed order, so it overlaps as well: the rest's gradients are posted first, then goes what
needs no neighbour, and what arrived is added last.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.comm import Work
from allstep.comm.agreement import digest
from allstep.comm.work import JoinedWork
from allstep.errors import UsageError
from allstep.nn.windows.grid import Grid
from allstep.nn.windows.plan import plan_fetch
from allstep.nn.windows.trip import Trip
from allstep.nn.windows.window import Layout, Window

__all__ = [
    "Delivery",
    "deliver",
    "fetch",
    "finish_deliver",
    "redistribute",
    "start_deliver",
    "start_fetch",
]


def fetch(
    grid: Grid,
    x: Tensor,
    layout: Layout,
    input_windows: Sequence[Window],
    *,
    first_dim: int = -2,
    fill: float = 0.0,
) -> Tensor:
    """This worker's input window of a distributed array; see [Note: halo].

    Args:
        grid: the workers; all of them must call this.
        x: this worker's output window; dims before and after the array's are whole.
        layout: who owns what.
        input_windows: what each worker wants, by rank.
        first_dim: the first dim of `x` that is the array's; the others follow.
        fill: the value outside of the array.

    Returns:
        The input window, with x's other dims.

    Raises:
        UsageError: if `x` is not of the size of its output window.
        DisagreementError: if workers pass other layouts, windows, dtypes or sizes.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process(), (1,))
    >>> layout = grid.split((3,))
    >>> fetch(grid, torch.ones(3), layout, [Window((-1,), (5,))], first_dim=0)
    tensor([0., 1., 1., 1., 0., 0.])
    """
    _, work = start_fetch(grid, x, layout, input_windows, first_dim=first_dim, fill=fill)
    return work.wait()[0]


def start_fetch(
    grid: Grid,
    x: Tensor,
    layout: Layout,
    input_windows: Sequence[Window],
    *,
    pieces: Sequence[Window] | None = None,
    first_dim: int = -2,
    fill: float = 0.0,
) -> tuple[Tensor, Work[tuple[Tensor, ...]]]:
    """Posts the messages of `fetch`; see [Note: overlap].

    Args:
        grid, x, layout, input_windows, first_dim, fill: as in `fetch`.
        pieces: parts of this worker's input window that are wanted; None for the whole of it.

    Returns:
        `x` again, for what needs no neighbour; a work that gives the pieces.
    """
    windows = tuple(input_windows)
    dims = _dims(x, layout, first_dim)
    _agree(grid, "fetch", x, layout, windows, layout.windows[grid.rank], dims)
    trip = Trip(grid, plan_fetch(layout, windows, grid.rank), dims, _pieces(grid, windows, pieces))
    trip.fill = fill
    local, ticket = _StartFetch.apply(trip, x)  # type: ignore[no-untyped-call]

    def assemble() -> tuple[Tensor, ...]:
        pieces: tuple[Tensor, ...] = _FinishFetch.apply(trip, local, ticket)  # type: ignore[no-untyped-call]
        return pieces

    return local, JoinedWork([trip.arrivals], assemble)


class Delivery(NamedTuple):
    """A delivery under way: its messages, and what puts it in autograd's order."""

    trip: Trip
    ticket: Tensor


def deliver(
    grid: Grid,
    x: Tensor,
    layout: Layout,
    input_windows: Sequence[Window],
    *,
    first_dim: int = -2,
) -> Tensor:
    """Sends what each worker has for other workers' positions home, where it is added.

    The transpose of `fetch`, with its arguments.

    Args:
        grid: the workers; all of them must call this.
        x: this worker's contribution to its input window; outside of the array it is dropped.
        layout: who owns what.
        input_windows: to which positions each worker contributes, by rank.
        first_dim: the first dim of `x` that is the array's.

    Returns:
        This worker's output window: its own contribution and the others', added by rank.

    >>> from allstep.comm import Communicator
    >>> grid = Grid(Communicator.single_process(), (1,))
    >>> deliver(grid, torch.ones(6), grid.split((3,)), [Window((-1,), (5,))], first_dim=0)
    tensor([1., 1., 1.])
    """
    kept, delivery = start_deliver(grid, (x,), layout, input_windows, first_dim=first_dim)
    return finish_deliver(kept, delivery)


def start_deliver(
    grid: Grid,
    xs: Sequence[Tensor],
    layout: Layout,
    input_windows: Sequence[Window],
    *,
    pieces: Sequence[Window] | None = None,
    first_dim: int = -2,
) -> tuple[Tensor, Delivery]:
    """Posts the messages of `deliver`; see [Note: overlap].

    Args:
        grid, layout, input_windows, first_dim: as in `deliver`.
        xs: the contributions, one for each piece.
        pieces: parts of this worker's input window; None for the whole of it. Where they overlap
            they are added.

    Returns:
        This worker's own part of the contributions; what `finish_deliver` needs beside it.
    """
    windows = tuple(input_windows)
    dims = _dims(xs[0], layout, first_dim)
    cut = _pieces(grid, windows, pieces)
    for x, piece in zip(xs, cut, strict=True):
        _agree(grid, "deliver", x, layout, windows, piece, dims)
    trip = Trip(grid, plan_fetch(layout, windows, grid.rank), dims, cut)
    kept, ticket = _StartDelivery.apply(trip, *xs)  # type: ignore[no-untyped-call]
    return kept, Delivery(trip, ticket)


def finish_deliver(kept: Tensor, delivery: Delivery) -> Tensor:
    """Waits for the messages of `start_deliver` and adds them up; see [Note: overlap].

    Args:
        kept: what `start_deliver` returned, with all that this worker adds to it.
        delivery: what it returned beside that.

    Returns:
        This worker's output window.
    """
    total: Tensor = _FinishDelivery.apply(delivery.trip, kept, delivery.ticket)  # type: ignore[no-untyped-call]
    return total


def redistribute(
    grid: Grid, x: Tensor, source: Layout, target: Layout, *, first_dim: int = -2
) -> Tensor:
    """Moves an array from one layout to another; backward moves the gradient back.

    Args:
        grid: the workers; all of them must call this.
        x: this worker's window in `source`.
        source, target: layouts of the same array.
        first_dim: the first dim of `x` that is the array's.

    Returns:
        This worker's window in `target`.
    """
    fault = None
    if source.shape != target.shape:
        fault = f"`target` has shape {target.shape}, `source` {source.shape}; pass equal shapes."
    grid.agree(f"redistribute of {source.shape}", fault)
    return fetch(grid, x, source, target.windows, first_dim=first_dim)


def _dims(x: Tensor, layout: Layout, first_dim: int) -> tuple[int, ...]:
    """The dims of `x` that are the array's."""
    first = first_dim if first_dim >= 0 else x.dim() + first_dim
    return tuple(range(first, first + len(layout.shape)))


def _pieces(
    grid: Grid, windows: tuple[Window, ...], pieces: Sequence[Window] | None
) -> tuple[Window, ...]:
    if pieces is not None and not pieces:
        raise UsageError("`pieces` is empty; pass at least one window, or None.")
    return (windows[grid.rank],) if pieces is None else tuple(pieces)


def _agree(
    grid: Grid,
    verb: str,
    x: Tensor,
    layout: Layout,
    windows: tuple[Window, ...],
    held: Window,
    dims: tuple[int, ...],
) -> None:
    """All workers pass the same layouts, and `x` is of the size of its window."""
    others = ["*" if dim in dims else str(length) for dim, length in enumerate(x.shape)]
    wanted = f"`{verb}` of {x.dtype} [{', '.join(others)}] {_described(layout, windows)}"
    if x.requires_grad and torch.is_grad_enabled():
        wanted += ", differentiated"
    fault = None
    size = tuple(x.shape[dim] if 0 <= dim < x.dim() else None for dim in dims)
    if size != held.shape:
        fault = (
            f"`x` has shape {list(x.shape)}; rank {grid.rank}'s window of the array of shape "
            f"{list(layout.shape)} needs {list(held.shape)} in dims {list(dims)}."
        )
    grid.agree(wanted, fault)


@lru_cache(maxsize=1024)
def _described(layout: Layout, windows: tuple[Window, ...]) -> str:
    """Short, for many workers have many windows."""
    marks = [f"{digest(value):016x}"[:8] for value in (layout, windows)]
    return f"of an array of shape {list(layout.shape)} (layout {marks[0]}, windows {marks[1]})"


class _StartFetch(Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        trip.send_own(x, "fetch")
        return x.view_as(x), x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        grad, ticket = grads
        back, ctx.trip.back = ctx.trip.back, None
        if back is None:  # nothing here depends on the pieces; the others still wait
            back = ctx.trip.reversed("backward of fetch")
            kept, ticket = _StartDelivery.apply(back, *back.zeros(grad))  # type: ignore[no-untyped-call]
            grad = grad + kept
        return None, _FinishDelivery.apply(back, grad, ticket)  # type: ignore[no-untyped-call]


class _FinishFetch(Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, local: Tensor, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        return trip.assemble(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        back = ctx.trip.back = ctx.trip.reversed("backward of fetch")
        return None, *_StartDelivery.apply(back, *grads)  # type: ignore[no-untyped-call]


class _StartDelivery(Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, *xs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        return trip.send_home(xs, "deliver"), xs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, ticket = grads
        back, ctx.trip.back = ctx.trip.back, None
        if back is None:  # nothing here depends on the sum; the others still wait
            back = ctx.trip.reversed("backward of deliver")
            _, ticket = _StartFetch.apply(back, torch.zeros_like(grad))  # type: ignore[no-untyped-call]
        return None, *_FinishFetch.apply(back, grad, ticket)  # type: ignore[no-untyped-call]


class _FinishDelivery(Function):
    @staticmethod
    def forward(ctx: Any, trip: Trip, kept: Tensor, ticket: Tensor) -> Tensor:
        ctx.trip = trip
        return trip.add_arrived(kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        back = ctx.trip.back = ctx.trip.reversed("backward of deliver")
        return None, *_StartFetch.apply(back, *grads)  # type: ignore[no-untyped-call]
