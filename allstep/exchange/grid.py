"""Rounds gradients so that their sums have the same bits in any order."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from allstep.device import is_accelerator, read_scalars
from allstep.exchange.compiled import CompiledRounding

_MARGIN = 32.0  # of a global gradient's largest element, before it leaves the grid
_KEPT = 0.9  # share of the largest element that is left when it is looked at again
_FAR = 2.0**-4  # of the largest element, below which sums are far from it
_KEPT_FAR = 0.5  # then
_FALLEN = 2.0**-12  # of the largest element, below which it is forgotten at once
_FALLEN_OFF = 2.0**-8  # the same where something left the grid
_GROWTH = 64.0  # largest factor from one look to the next: one wild step spoils few others
_UNKNOWN_ROW = 2.0**-4  # of the parameter's largest element, for a row that had none
_LEFT_ROW = 2.0**-3  # the same after a step in which a row left the grid
_QUIET_ROW = 2.0**-20  # and for others at least
_ROW_SIZE = 64  # elements below which rows share one unit
_LOOK_EVERY = 16  # exchanges
_LOOK_EVERY_EARLY = 4  # of the first _NUM_EARLY
_NUM_EARLY = 64
LOOK_ALWAYS = 16  # first exchanges, in which gradients change fast
_EVEN = 16.0  # of the least limit, up to which the rows of a gradient may stay below that
_CHUNK = 1 << 18  # elements that stay in the cache between the passes


@dataclass(frozen=True)
class Unit:
    """The units to which a gradient's rows are rounded.

    Attributes:
        shift: 1.5 * 2^(digits - 1) units, [rows, 1]; adding and subtracting it rounds.
        limit: largest magnitude allowed in a row, [rows].
        smallest: the share of its limit that at least one row must reach.
    """

    shift: Tensor
    limit: Tensor
    smallest: float

    def is_good(self, share: float) -> bool:
        """Whether a gradient fits if its largest element has this share of its limit."""
        return share == 0 or self.smallest <= share <= 1

    @cached_property
    def in_memory(self) -> tuple[int, int, int, float]:
        """Number of rows, addresses of `shift` and `limit`, and `smallest`."""
        return self.limit.numel(), self.shift.data_ptr(), self.limit.data_ptr(), self.smallest

    def share_of(self, rows: Tensor, index: slice = slice(None)) -> float:
        """The largest share that an element of some rows has of its row's limit; NaN if one is NaN.

        On the CPU one kernel handles all rows together: if their elements stay below the smallest
        limit, a smaller bound, the share of the largest limit, suffices. Shares are float64, as in
        `rounding.c`.

        Args:
            rows: the rows, [n, width].
            index: the rows' indices.
        """
        least, most = self._limits
        if most > _EVEN * least:
            return float(_share(rows, self.limit[index].double()))
        low, high = torch.aminmax(rows)
        largest = max(high.item(), -low.item())
        share = largest / most
        if least == most or largest == 0 or (largest <= least and share >= self.smallest):
            return share
        return float(_share(rows, self.limit[index].double()))

    @cached_property
    def _limits(self) -> tuple[float, float]:
        """The smallest and the largest of the rows' limits."""
        return self.limit.amin().item(), self.limit.amax().item()


class Grid:
    """Rounds each micro-batch's gradients to multiples of a unit that all workers know.

    [Note: grid] A gradient g_k, weighed by its samples, is rounded before it is added up:

        g_k' = u round(g_k / u)        while |g_k| <= L,  K (L + u / 2) <= 2^digits u

    With K terms in a step and 24 binary digits (53 for float64), every float addition of such
    terms is exact. So accumulation, buckets and any all-reduce give the same bits in any order
    and grouping, at no byte more. The unit belongs to a row of the parameter; it follows from the
    global gradients of earlier steps, which are the same on any number of workers:

        L = M T / sqrt(K)        T: largest magnitude of the row's earlier sums,  M: a margin

    since a sum of K noisy terms is about sqrt(K) times as large as one of them. T is measured in
    each of the first 16 exchanges, in every fourth of the first 64, in every 16th later, and after
    a step in which something left the grid. It then decreases by a tenth at most, by half if the
    sums are 16 times smaller, or all the way if they are 4,096 times smaller; until then a sudden
    decrease of the gradients costs digits. For a parameter that left the grid it does not decrease,
    and is at least an eighth of the parameter's largest: rows of an embedding have no gradient
    until their word occurs. (Without this rule something left the grid in 45 % of a small language
    model's steps, with it in 1 %.) In a training of `digits`, whose gradients fall to a thousandth
    and vary by as much, a sum's largest element has 14 digits, 9 in the worst of a hundred.

    A gradient does not fit if it is too large, if it is so small that its largest element would
    have no digit left, if nothing is known of its parameter yet, or if its dtype has 16 bits. It is
    added to a `comm.reproducible.ReproducibleSum` instead. The flags behind the gradients tell all
    workers of it, and the sums of such parameters are completed in a second exchange. Whether a
    gradient fits depends only on itself, so the result still has the same bits. NaN and infinity
    don't fit, and arrive this way.

    On an accelerator the host would wait for each of these decisions. There the device makes them,
    and writes zeros in place of what does not fit; the host reads all decisions together, once a
    micro-batch, and then adds those gradients to the separate sums, having kept them until then.

    Args:
        compiled: rounds in place of torch's kernels, with the same bits; see `compiled.py`.
    """

    def __init__(self, compiled: CompiledRounding | None = None) -> None:
        self._compiled = compiled
        self._tops: dict[str, Tensor] = {}  # T by row
        # For the present number of terms, and for gradients of a shape, dtype and device.
        self._units: dict[str, tuple[Unit, tuple[torch.Size, torch.dtype, torch.device]]] = {}
        self._num_terms = 1
        self._num_terms_each = 1
        self._num_added: dict[tuple[str, int], int] = {}  # in this micro-batch, by (name, rank)
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def begin(self, num_micro_batches: int, num_terms_each: int = 1) -> None:
        """Begins a global batch.

        Args:
            num_micro_batches: micro-batches of all workers together.
            num_terms_each: the most gradients that one micro-batch adds to a parameter's; further
                ones leave the grid.
        """
        num_terms = num_micro_batches * num_terms_each
        self._num_terms_each = num_terms_each
        if num_terms != self._num_terms:
            self._num_terms = num_terms
            self._units.clear()

    def begin_micro_batch(self) -> None:
        """Called before the gradients of each micro-batch."""
        self._num_added.clear()

    def round(
        self,
        name: str,
        gradient: Tensor,
        out: Tensor | None = None,
        *,
        adds: bool = False,
        rank: int = 0,
    ) -> Tensor | None:
        """The gradient on the grid, or None if it does not fit.

        Args:
            name: the parameter's name.
            gradient: one micro-batch's weighted gradient; dense and real.
            out: memory for the result, of the same shape; None for new memory.
            adds: whether to add to what `out` holds; it is unchanged if the gradient doesn't fit.
            rank: rank of the micro-batch's worker, if gradients of several workers come here.

        Returns:
            `out`, or the new tensor.
        """
        unit = self._unit_of(name, gradient, rank)
        if unit is None or not gradient.numel():
            return None if unit is None else gradient if out is None else out
        if gradient.is_contiguous() and (out is None or out.is_contiguous()):
            target = torch.empty_like(gradient) if out is None else out
            return target if self._round(gradient, unit, target, adds=adds) else None
        order = _order_in_memory(gradient if out is None else out)
        rows = _in_rows(gradient, order)
        target = rows if out is None else _in_rows(out, order)
        is_in_place = out is not None and _lie_together(target, out)
        if not is_in_place:
            target = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if not self._round(rows, unit, target, adds=adds and is_in_place):
            return None
        if is_in_place:
            return out
        rounded = _from_rows(target, gradient.shape, order)
        if out is None:
            return rounded
        return out.add_(rounded) if adds else out.copy_(rounded)

    def round_unread(
        self, name: str, gradient: Tensor, rank: int = 0
    ) -> tuple[Tensor, Tensor, Unit] | None:
        """The gradient on the grid, or zeros if it does not fit, without waiting for the device.

        Args:
            name: the parameter's name.
            gradient: as in `round`.
            rank: as in `round`.

        Returns:
            The gradient; the largest share of its limits, a scalar on the device; and the unit,
            which decides whether this share fits. None if nothing is known of the parameter, so
            that the gradient does not fit.
        """
        unit = self._unit_of(name, gradient, rank)
        if unit is None or not gradient.numel():
            return None
        order = _order_in_memory(gradient)
        rows = _in_rows(gradient, order)
        share = _share(rows, unit.limit)
        is_off = share.clamp(unit.smallest, 1) != share  # NaN is, and zeros, which stay zeros
        rounded = torch.empty_like(rows, memory_format=torch.contiguous_format)
        torch.add(rows, unit.shift, out=rounded).sub_(unit.shift).masked_fill_(is_off, 0.0)
        return _from_rows(rounded, gradient.shape, order), share, unit

    def _unit_of(self, name: str, gradient: Tensor, rank: int) -> Unit | None:
        """The unit for another gradient of the micro-batch; None if nothing is known."""
        num_added = self._num_added[name, rank] = self._num_added.get((name, rank), 0) + 1
        if num_added > self._num_terms_each:
            return None
        unit, form = self._units.get(name, (None, None))
        own_form = gradient.shape, gradient.dtype, gradient.device
        if form == own_form:
            return unit
        top = self._tops.get(name)
        if top is None or len(top) != _num_rows(gradient.shape) or top.device != gradient.device:
            return None  # nothing is known, or the parameter is another by now
        unit = self._new_unit(top, gradient.dtype)
        self._units[name] = unit, own_form
        return unit

    def _round(self, x: Tensor, unit: Unit, out: Tensor, *, adds: bool) -> bool:
        """Rounds a tensor whose memory is in the order of its rows; returns whether it fits."""
        compiled = self._compiled
        if compiled is not None and compiled.takes(x, out):
            return unit.is_good(compiled.round(x, out, unit.in_memory, adds))
        num_rows = len(unit.limit)
        return self._round_by_torch(x.view(num_rows, -1), unit, out.view(num_rows, -1), adds=adds)

    def _round_by_torch(self, rows: Tensor, unit: Unit, out: Tensor, *, adds: bool) -> bool:
        """`_round` for [rows, n], by torch's kernels, in parts that fit the cache."""
        largest = 0.0
        for (index, piece), (_, target) in zip(_pieces(rows), _pieces(out), strict=True):
            share = unit.share_of(piece, index)
            if not share <= 1:
                return False
            largest = max(largest, share)
            if not adds:
                torch.add(piece, unit.shift[index], out=target).sub_(unit.shift[index])
        if adds and unit.is_good(largest):
            for (index, piece), (_, target) in zip(_pieces(rows), _pieces(out), strict=True):
                rounded = torch.add(piece, unit.shift[index], out=self._scratch_for(piece))
                target.add_(rounded.sub_(unit.shift[index]))
        return unit.is_good(largest)

    def _scratch_for(self, piece: Tensor) -> Tensor:
        """Memory for a part of a gradient that fits the cache."""
        key = piece.dtype, piece.device
        memory = self._scratch.get(key)
        if memory is None or memory.numel() < piece.numel():
            size = max(_CHUNK, piece.numel())
            memory = self._scratch[key] = torch.empty(size, dtype=key[0], device=key[1])
        return memory[: piece.numel()].view(piece.shape)

    def names_to_look_at(
        self, num_exchanges: int, summed: Iterable[str], off_grid: Collection[str]
    ) -> list[str]:
        """The parameters whose global gradients `look_at` needs after this exchange.

        Args:
            num_exchanges: number of exchanges so far.
            summed: names of the parameters with a global gradient.
            off_grid: names of those of which a part did not fit.
        """
        every = _LOOK_EVERY_EARLY if num_exchanges < _NUM_EARLY else _LOOK_EVERY
        always = num_exchanges < LOOK_ALWAYS or num_exchanges % every == 0
        return [name for name in summed if always or name in off_grid]

    def look_at(self, totals: Mapping[str, Tensor], off_grid: Collection[str] = ()) -> None:
        """Adapts the units to global gradients; on an accelerator the host waits once.

        Args:
            totals: name -> global gradient, the same on all workers.
            off_grid: names of the gradients of which a part did not fit.
        """
        new = {
            name: largest_of_rows(total)
            for name, total in totals.items()
            if total.dtype in _DIGITS and total.numel()
        }
        self.follow(new, off_grid)

    def follow(self, new: Mapping[str, Tensor], off_grid: Collection[str] = ()) -> None:
        """Updates the units from the largest elements of global gradients.

        Args:
            new: name -> result of `largest_of_rows`, the same on all workers.
            off_grid: names of the gradients of which a part did not fit.
        """
        old = {name: top for name in new if (top := self._top_like(name, new[name])) is not None}
        largest = read_scalars([x.amax() for x in (*new.values(), *old.values())])
        largest_new = dict(zip(new, largest, strict=False))
        largest_old = dict(zip(old, largest[len(new) :], strict=True))
        for name, top in new.items():
            if not math.isfinite(largest_new[name]):
                continue  # a later one tells more
            if name in old:
                has_left = name in off_grid
                fallen = _FALLEN_OFF if has_left else _FALLEN
                share = largest_new[name] / largest_old[name] if largest_old[name] > 0 else 1.0
                kept = 1.0 if has_left else _KEPT_FAR if share < _FAR else _KEPT
                kept = 0.0 if share < fallen else kept
                top = _followed(top, old[name], largest_old[name], kept)
            self._tops[name] = top
            self._units.pop(name, None)

    def _top_like(self, name: str, new: Tensor) -> Tensor | None:
        """The largest elements recorded for a parameter; None if it has changed its shape."""
        old = self._tops.get(name)
        is_same = old is not None and len(old) == len(new) and old.device == new.device
        return old if is_same else None

    def state_dict(self) -> dict[str, Any]:
        """The state from which the next units follow, equal on all workers."""
        return {"tops": dict(self._tops)}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Goes on where `state_dict` was taken, on any number of workers."""
        self._tops = {name: top.to(device) for name, top in state["tops"].items()}
        self._units.clear()

    def _new_unit(self, top: Tensor, dtype: torch.dtype) -> Unit:
        digits, limits = _DIGITS[dtype], torch.finfo(dtype)
        terms = self._num_terms
        room = 2.0 ** max(2, math.ceil(math.log2(terms)))  # for the terms of a sum
        limit_in_units = 2.0**digits / room
        of_all = top.amax()
        largest = torch.where(
            top == 0, _UNKNOWN_ROW * of_all, torch.maximum(top, _QUIET_ROW * of_all)
        )
        largest *= _MARGIN / math.sqrt(terms)
        largest.clamp_(limits.tiny * 2.0**digits, limits.max / (4 * room))  # sums are finite, too
        unit = _power_of_two_above(largest) / limit_in_units
        return Unit(
            shift=(1.5 * 2.0 ** (digits - 1) * unit).to(dtype)[:, None],
            limit=((limit_in_units - 1) * unit).to(dtype),  # one less, for what is rounded up
            smallest=1 / limit_in_units,
        )


def _followed(new: Tensor, old: Tensor, largest: float, kept: float) -> Tensor:
    """T of each row, after another sum; `largest` is that of `old`, of which so much is kept."""
    top = torch.maximum(kept * old, new)
    top = torch.where(new == 0, old, top)  # zeros tell nothing of the next ones
    if largest > 0:
        top.clamp_(max=_GROWTH * largest)
    # A row that leaves was not as quiet as it had seemed, and others may not be.
    return torch.maximum(top, _LEFT_ROW * top.amax()) if kept == 1 else top


_DIGITS = {torch.float32: 24, torch.float64: 53}


def _num_rows(shape: torch.Size) -> int:
    """Parts of a parameter with a unit each: slices of its first dimension, if these are large."""
    is_large = len(shape) > 1 and shape.numel() >= _ROW_SIZE * shape[0]
    return shape[0] if is_large else 1


def _order_in_memory(x: Tensor) -> list[int] | None:
    """Its dimensions as its memory has them, from the slowest on, where rows are whole there.

    None for the dimensions as they are.
    """
    if x.is_contiguous():
        return None
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    is_dense = x.permute(order).is_contiguous()
    return order if is_dense and (order[0] == 0 or _num_rows(x.shape) == 1) else None


def _in_rows(x: Tensor, order: list[int] | None) -> Tensor:
    """The elements as [rows, n], the dimensions in this order: a view where memory allows it."""
    return (x if order is None else x.permute(order)).reshape(_num_rows(x.shape), -1)


def _from_rows(rows: Tensor, shape: torch.Size, order: list[int] | None) -> Tensor:
    """The inverse of `_in_rows`."""
    if order is None:
        return rows.view(shape)
    back = [order.index(dim) for dim in range(len(order))]
    return rows.view([shape[dim] for dim in order]).permute(back)


def _lie_together(x: Tensor, y: Tensor) -> bool:
    """Whether one is a view of the other."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def largest_of_rows(x: Tensor) -> Tensor:
    """The largest magnitude of each row of a gradient, [rows], float64; NaN where there is one."""
    return _largest_of(_in_rows(x, _order_in_memory(x)))


def largest_of_rows_of_part(part: Tensor, shape: torch.Size, start: int) -> Tensor:
    """`largest_of_rows` for a part of a gradient: [rows] of the whole, 0 for rows elsewhere.

    Args:
        part: a slice along any dimension.
        shape: of the whole gradient.
        start: of the part along the first dimension.
    """
    num = _num_rows(shape)
    found = torch.zeros(num, dtype=torch.float64, device=part.device)
    if part.numel():
        is_one = num == 1
        rows = part.reshape(1 if is_one else part.shape[0], -1)
        start = 0 if is_one else start
        found[start : start + len(rows)] = _largest_of(rows)
    return found


def _largest_of(rows: Tensor) -> Tensor:
    tops = rows.new_zeros(len(rows))
    if rows.numel():
        for index, piece in _pieces(rows):
            tops[index] = torch.maximum(tops[index], _largest(piece))
    return tops.to(torch.float64)


def _pieces(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Parts of [rows, n] that stay in the cache between two passes, and which rows they are of."""
    height, width = rows.shape
    if is_accelerator(rows.device) or rows.numel() <= _CHUNK:
        yield slice(None), rows
    elif height == 1:
        yield from ((slice(None), piece) for piece in torch.split(rows, _CHUNK, dim=1))
    else:
        num = max(1, _CHUNK // width)
        for start in range(0, height, num):
            yield slice(start, start + num), rows[start : start + num]


def _share(rows: Tensor, limit: Tensor) -> Tensor:
    shares = _largest(rows) / limit
    return shares.amax() if len(shares) > 1 else shares[0]


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitudes in [rows, n], faster than by `abs`; NaN where there is one."""
    if is_accelerator(rows.device):
        found: Tensor = torch.linalg.vector_norm(rows, math.inf, dim=1)  # one kernel
        return found
    return torch.maximum(rows.amax(1), rows.amin(1).neg_())


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest one that is larger, made from its digits: `exp2` may be off in the last."""
    _, exponent = torch.frexp(x)
    return ((exponent.long() + 1023) << 52).view(torch.float64)
