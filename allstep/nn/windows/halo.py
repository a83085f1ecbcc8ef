"""Gives each worker its input window of an array of which each owns a part.

[Note: halo] An array is split over workers; each owns its output window. To compute the next
array's part a worker needs its input window: what its receptive fields see, in the same global
coordinates. The two overlap with other workers', so `halo_gather` sends every worker the
intersections of its input window with the others' output windows, one message each, and nothing
else; what lies outside of the array is padding. Its backward is `halo_scatter_add`: the gradient
of each intersection goes to the owner and is added there. The backward of `halo_scatter_add` is
`halo_gather`.

[Note: overlap] Both come in two phases. `start_halo_gather` posts all messages and gives x back;
what needs no neighbour is computed from that x; `wait` gives the rest. Autograd runs backward in
reversed order, so it overlaps as well: the rest's gradients are posted first, then goes what
needs no neighbour, and what arrived is added last. An empty tensor, the token, goes from each
start to its finish, so that autograd knows this order.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.comm import Work
from allstep.comm.agreement import digest
from allstep.comm.work import JoinedWork
from allstep.errors import UsageError
from allstep.nn.windows.grid import Grid
from allstep.nn.windows.halo_exchange import HaloExchange
from allstep.nn.windows.plan import plan_halo
from allstep.nn.windows.window import Layout, Window


def halo_gather(
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
    >>> halo_gather(grid, torch.ones(3), layout, [Window((-1,), (5,))], first_dim=0)
    tensor([0., 1., 1., 1., 0., 0.])
    """
    _, work = start_halo_gather(grid, x, layout, input_windows, first_dim=first_dim, fill=fill)
    return work.wait()[0]


def start_halo_gather(
    grid: Grid,
    x: Tensor,
    layout: Layout,
    input_windows: Sequence[Window],
    *,
    pieces: Sequence[Window] | None = None,
    first_dim: int = -2,
    fill: float = 0.0,
) -> tuple[Tensor, Work[tuple[Tensor, ...]]]:
    """Posts the messages of `halo_gather`; see [Note: overlap].

    Args:
        grid, x, layout, input_windows, first_dim, fill: as in `halo_gather`.
        pieces: parts of this worker's input window that are wanted; None for the whole of it.

    Returns:
        `x` again, for what needs no neighbour; a work that gives the pieces.
    """
    windows = tuple(input_windows)
    dims = _dims(x, layout, first_dim)
    _agree(grid, "halo_gather", x, layout, windows, layout.windows[grid.rank], dims)
    plan, cut = plan_halo(layout, windows, grid.rank), _pieces(grid, windows, pieces)
    exchange = HaloExchange(grid, plan, dims, cut, "halo_gather", fill)
    local, token = _StartGather.apply(exchange, x)  # type: ignore[no-untyped-call]

    def gather() -> tuple[Tensor, ...]:
        gathered: tuple[Tensor, ...] = _FinishGather.apply(exchange, local, token)  # type: ignore[no-untyped-call]
        return gathered

    return local, JoinedWork([exchange.arrivals], gather)


def halo_scatter_add(
    grid: Grid,
    x: Tensor,
    layout: Layout,
    input_windows: Sequence[Window],
    *,
    first_dim: int = -2,
) -> Tensor:
    """Sends each worker's contributions to their owners, where they are added.

    The transpose of `halo_gather`, with its arguments.

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
    >>> layout = grid.split((3,))
    >>> halo_scatter_add(grid, torch.ones(6), layout, [Window((-1,), (5,))], first_dim=0)
    tensor([1., 1., 1.])
    """
    kept, finish = start_halo_scatter_add(grid, (x,), layout, input_windows, first_dim=first_dim)
    return finish(kept)


def start_halo_scatter_add(
    grid: Grid,
    xs: Sequence[Tensor],
    layout: Layout,
    input_windows: Sequence[Window],
    *,
    pieces: Sequence[Window] | None = None,
    first_dim: int = -2,
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Posts the messages of `halo_scatter_add`; see [Note: overlap].

    Args:
        grid, layout, input_windows, first_dim: as in `halo_scatter_add`.
        xs: the contributions, one for each piece.
        pieces: parts of this worker's input window; None for the whole of it. Where they overlap
            they are added.

    Returns:
        This worker's own part of the contributions; a function that takes it, with all that this
        worker adds to it, waits for the messages and returns the output window. No `Work`, because
        autograd has to see what is added.
    """
    windows = tuple(input_windows)
    dims = _dims(xs[0], layout, first_dim)
    cut = _pieces(grid, windows, pieces)
    for x, piece in zip(xs, cut, strict=True):
        _agree(grid, "halo_scatter_add", x, layout, windows, piece, dims)
    plan = plan_halo(layout, windows, grid.rank)
    exchange = HaloExchange(grid, plan, dims, cut, "halo_scatter_add")
    kept, token = _StartScatterAdd.apply(exchange, *xs)  # type: ignore[no-untyped-call]

    def finish(kept: Tensor) -> Tensor:
        total: Tensor = _FinishScatterAdd.apply(exchange, kept, token)  # type: ignore[no-untyped-call]
        return total

    return kept, finish


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
    return halo_gather(grid, x, source, target.windows, first_dim=first_dim)


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


class _StartGather(Function):
    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        exchange.send_own(x)
        return x.view_as(x), x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        grad, token = grads
        back, ctx.exchange.back = ctx.exchange.back, None
        if back is None:  # nothing here depends on the pieces; the others still wait
            back = ctx.exchange.reversed()
            kept, token = _StartScatterAdd.apply(back, *back.zeros(grad))  # type: ignore[no-untyped-call]
            grad = grad + kept
        return None, _FinishScatterAdd.apply(back, grad, token)  # type: ignore[no-untyped-call]


class _FinishGather(Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: HaloExchange, local: Tensor, token: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.gather(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        back = ctx.exchange.back = ctx.exchange.reversed()
        return None, *_StartScatterAdd.apply(back, *grads)  # type: ignore[no-untyped-call]


class _StartScatterAdd(Function):
    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, *xs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return exchange.send_contributions(xs), xs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, token = grads
        back, ctx.exchange.back = ctx.exchange.back, None
        if back is None:  # nothing here depends on the sum; the others still wait
            back = ctx.exchange.reversed()
            _, token = _StartGather.apply(back, torch.zeros_like(grad))  # type: ignore[no-untyped-call]
        return None, *_FinishGather.apply(back, grad, token)  # type: ignore[no-untyped-call]


class _FinishScatterAdd(Function):
    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, kept: Tensor, token: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.add(kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        back = ctx.exchange.back = ctx.exchange.reversed()
        return None, *_StartGather.apply(back, *grads)  # type: ignore[no-untyped-call]
