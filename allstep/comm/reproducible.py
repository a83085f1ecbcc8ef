"""Sums whose bits do not depend on the order and grouping in which their terms are added."""

import math
from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

from allstep.comm.communicator import Communicator

_WINDOW_BITS = 32  # leaves 21 bits of a float64, for 2^21 terms
_WINDOWS = range(-5, 5)  # enough for all of float32
_NONFINITE = _WINDOWS.stop  # the window in which NaN and infinity are added
_LIMIT = 2.0 ** (_WINDOW_BITS * _WINDOWS.stop)  # least magnitude that counts as infinite
_CHUNK = 1 << 18  # elements that fit into the cache
_DENSE_ELEMENTS = 1 << 10  # up to this size all windows are sent, in one message


class ReproducibleSum:
    """A float64 sum of tensors whose bits don't depend on order, grouping or number of workers.

    [Note: reproducible sum] Window j holds multiples of 2^(32 j) below 2^(32 (j + 1)). A term is
    split into digits: one for the window of its largest magnitude, and one for each of the next
    windows below. Which windows these are depends only on the term. In each window the digits add
    up without rounding, as long as there are fewer than 2^21 terms. In the end the windows are
    added, the smallest first.

        |error of a term| <= 2^-33 of its largest magnitude        (2^-65 for float64)

    A finite magnitude of 2^160 or more counts as infinite.

    Args:
        like: a tensor with the terms' shape, dtype and device.

    >>> forth, back = (ReproducibleSum(torch.zeros(())) for _ in range(2))
    >>> terms = [torch.tensor(x) for x in (1e20, 1.0, -1e20)]
    >>> for x, y in zip(terms, reversed(terms)):
    ...     forth.add(x)
    ...     back.add(y)
    >>> float(forth.total()), float(back.total())
    (1.0, 1.0)

    Source: Demmel and Nguyen, "Parallel reproducible summation", IEEE Transactions on Computers
    64 (7), 2015, sections 3 and 4.
    """

    def __init__(self, like: Tensor) -> None:
        self.shape, self.device = like.shape, like.device
        self._num_digits = 3 if like.dtype == torch.float64 else 2
        self._windows: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Adds a term.

        Args:
            x: tensor of the sum's shape; real, or a complex tensor viewed as real.
        """
        rest = x.detach().to(torch.float64, copy=True)
        largest = float(rest.abs().amax()) if rest.numel() else 0.0
        if not largest < _LIMIT:
            is_bad = ~(rest.abs() < _LIMIT)
            self._add_digits(_NONFINITE, torch.where(is_bad, rest * torch.inf, 0.0))
            rest.masked_fill_(is_bad, 0.0)
            largest = float(rest.abs().amax())
        if largest == 0:
            return
        for window, digits in self._cut(rest, _window_of(largest)):
            self._add_digits(window, digits)

    @torch.no_grad()
    def add_each(self, terms: Tensor) -> None:
        """Adds several terms: the same bits as one by one, but at once if magnitudes are similar.

        Args:
            terms: [n, *shape], each as for `add`.
        """
        largest = terms.flatten(1).abs().amax(1).tolist() if terms.numel() else []
        first, *others = {_window_of(x) if 0 < x < _LIMIT else None for x in largest} or {None}
        if first is None or others:
            for term in terms:
                self.add(term)
            return
        for window, digits in self._cut(terms.to(torch.float64, copy=True), first):
            self._add_digits(window, digits.sum(0))

    def _cut(self, rest: Tensor, first: int) -> Iterator[tuple[int, Tensor]]:
        """Digits of `rest`, whose largest magnitude is in window `first`; overwrites `rest`."""
        for window in range(first, max(first - self._num_digits, _WINDOWS.start - 1), -1):
            shift = 1.5 * 2.0 ** (52 + _WINDOW_BITS * window)
            digits = (rest + shift).sub_(shift)
            rest.sub_(digits)
            yield window, digits

    def total(self) -> Tensor:
        """The sum so far, of this worker's terms only; float64."""
        result = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        for window in sorted(self._windows):
            result += self._windows[window]
        return result

    def add_sum(self, other: "ReproducibleSum") -> None:
        """Adds all terms of another sum of this shape."""
        for window, digits in other._windows.items():
            self._add_digits(window, digits)

    def part(self, index: tuple[slice, ...]) -> "ReproducibleSum":
        """The sum of a part of each term, as a copy."""
        found = self.empty_like()
        found.shape = torch.empty(self.shape, device="meta")[index].shape
        found._windows = {window: x[index].clone() for window, x in self._windows.items()}
        return found

    def empty_like(self) -> "ReproducibleSum":
        """A sum without terms, of the same shape, dtype and device."""
        found = copy(self)
        found._windows = {}
        return found

    def _add_digits(self, window: int, digits: Tensor) -> None:
        if window in self._windows:
            self._windows[window] += digits
        else:
            self._windows[window] = digits

    def digits(self, window: int) -> Tensor:
        """The digits in one window."""
        held = self._windows.get(window)
        if held is None:
            return torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        return held


def reproducible_all_reduce(comm: Communicator, sums: Sequence[ReproducibleSum]) -> list[Tensor]:
    """The totals over all workers' terms: the same bits on any number of workers. Collective.

    Args:
        comm: the workers.
        sums: sums of the same shapes on all workers.

    Returns:
        The float64 total of each sum.
    """
    return [each.total() for each in sums_over_workers(comm, sums)]


def sums_over_workers(comm: Communicator, sums: Sequence[ReproducibleSum]) -> list[ReproducibleSum]:
    """Sums of all workers' terms, to which further terms can be added. Collective.

    Args:
        comm: the workers.
        sums: sums of the same shapes on all workers.
    """
    if comm.size == 1:
        return list(sums)
    windows = [*_WINDOWS, _NONFINITE]
    used = [(each, window) for each in sums for window in windows]
    if sum(each.shape.numel() for each in sums) > _DENSE_ELEMENTS:
        has = torch.tensor([int(window in each._windows) for each, window in used])
        comm.all_reduce(has, "max")
        used = [pair for pair, anywhere in zip(used, has.tolist(), strict=True) if anywhere]
    if not used:
        return list(sums)
    flat = torch.cat([each.digits(window).reshape(-1) for each, window in used])
    flat = comm.all_reduce(flat.to(comm.device))
    results = {id(each): each.empty_like() for each in sums}
    pieces = torch.split(flat, [each.shape.numel() for each, _ in used])
    for (each, window), piece in zip(used, pieces, strict=True):
        digits = piece.view(each.shape).to(each.device)
        results[id(each)]._windows[window] = digits
    return [results[id(each)] for each in sums]


def digits_of(x: Tensor) -> Tensor:
    """The digits of numbers in all windows, to add few numbers without waiting for a device.

    Up to 2^21 such digits add up without rounding, in any order and by any all-reduce.

    Args:
        x: real tensor of any shape.

    Returns:
        [*x.shape, digits], float64.

    >>> digits = digits_of(torch.tensor([1e20, 1.0, -1e20]))
    >>> float(sum_of_digits(digits.sum(0)))
    1.0
    """
    x = x.detach().double()
    is_good = x.abs() < _LIMIT
    exponents = [2.0 ** (_WINDOW_BITS * window) for window in _WINDOWS]
    units = torch.tensor(exponents, dtype=torch.float64).to(x.device, non_blocking=True)
    whole = (torch.where(is_good, x, 0.0)[..., None] / units).trunc_()  # in units of each window
    whole[..., :-1] -= whole[..., 1:] * 2.0**_WINDOW_BITS  # minus the part in higher windows
    bad = torch.where(is_good, 0.0, x * torch.inf)
    return torch.cat([whole * units, bad[..., None]], dim=-1)


def digits_of_squares(x: Tensor) -> Tensor:
    """Digits of the sum of a tensor's squares; those of a tensor's parts may be added up.

    Args:
        x: real tensor of any shape.

    Returns:
        [digits], float64; `sum_of_digits(carried(...))` of them, or of their sums, is the value.

    >>> x = torch.tensor([3e5, 1e-7, 4e5])
    >>> whole, parts = digits_of_squares(x), digits_of_squares(x[:1]) + digits_of_squares(x[1:])
    >>> float(sum_of_digits(carried(whole))) == float(sum_of_digits(carried(parts)))
    True
    """
    found = torch.zeros(len(_WINDOWS) + 1, dtype=torch.float64, device=x.device)
    flat = x.detach().reshape(-1)
    for piece in torch.split(flat, _CHUNK) if len(flat) else ():
        rest = piece.to(torch.float64, copy=True).square_()
        sums = torch.zeros_like(found)
        largest = float(rest.amax())
        if not largest < _LIMIT:
            is_bad = ~(rest < _LIMIT)
            sums[-1] = torch.where(is_bad, rest * torch.inf, 0.0).sum()
            rest.masked_fill_(is_bad, 0.0)
            largest = float(rest.amax())
        window = _WINDOWS.stop
        while largest > 0:  # a square's digits depend only on itself
            window = min(_window_of(2 * largest), window - 1)  # half a unit may round to zero
            shift = 1.5 * 2.0 ** (52 + _WINDOW_BITS * window)
            digits = (rest + shift).sub_(shift)
            rest.sub_(digits)
            sums[window - _WINDOWS.start] += digits.sum()
            largest = float(rest.abs().amax()) if window > _WINDOWS.start else 0.0
        found += digits_of(sums).sum(0)
    return found


def carried(digits: Tensor) -> Tensor:
    """Carries between windows, so that equal values that are not negative get equal digits.

    Args:
        digits: [digits], some of which may be too large for their window, or below 0.
    """
    found = digits.clone()
    for index, window in enumerate(_WINDOWS[:-1]):
        over = 2.0 ** (_WINDOW_BITS * (window + 1))
        carry = torch.floor(found[index] / over) * over
        found[index] -= carry
        found[index + 1] += carry
    return found


def sum_of_digits(digits: Tensor) -> Tensor:
    """The numbers whose digits `digits_of` returned, also from sums of such digits.

    Args:
        digits: [*shape, digits].

    Returns:
        [*shape], float64.
    """
    result = torch.zeros_like(digits[..., 0])
    for window in digits.unbind(-1):
        result = result + window
    return result


def _window_of(magnitude: float) -> int:
    """The window of a positive number's leading digit; the lowest window for smaller numbers."""
    _, exponent = math.frexp(magnitude)  # magnitude < 2^exponent
    return max(-(-exponent // _WINDOW_BITS) - 1, _WINDOWS.start)
