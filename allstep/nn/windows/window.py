"""Boxes of positions in an array's global coordinates, and how one is split over workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

from torch import Tensor

from allstep.errors import UsageError, check_type


@dataclass(frozen=True)
class Window:
    """The positions with start <= position < stop in each dim; may reach outside of its array.

    >>> Window((0, 2), (4, 6)).intersect(Window((3, 0), (9, 3)))
    Window(start=(3, 2), stop=(4, 3))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise UsageError(f"`stop` (={self.stop}) must have as many dims as {self.start}.")
        if any(a > b for a, b in zip(self.start, self.stop, strict=True)):
            raise UsageError(f"`stop` (={self.stop}) must not be below `start` (={self.start}).")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Window":
        """All positions of an array.

        >>> Window.whole((4, 6))
        Window(start=(0, 0), stop=(4, 6))
        """
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Positions in each dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def num_positions(self) -> int:
        """How many positions it has."""
        return prod(self.shape)

    def intersect(self, other: "Window") -> "Window":
        """The positions of both."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Window(start, tuple(map(max, start, stop)))

    def contains(self, other: "Window") -> bool:
        """Are all positions of the other one here?"""
        return self.intersect(other).num_positions == other.num_positions

    def slices(self, origin: "Window") -> tuple[slice, ...]:
        """Where it lies in a tensor that holds the window `origin`.

        >>> Window((3,), (5,)).slices(Window((2,), (9,)))
        (slice(1, 3, None),)
        """
        bounds = zip(self.start, self.stop, origin.start, strict=True)
        return tuple(slice(a - first, b - first) for a, b, first in bounds)

    def view(self, x: Tensor, held: "Window", first_dim: int) -> Tensor:
        """The part of a tensor that holds a larger window.

        Args:
            x: the tensor.
            held: the window that `x` holds.
            first_dim: the first dim of `x` that is the array's.
        """
        return x[(slice(None),) * (first_dim % x.dim()) + self.slices(held)]

    def scaled(self, factors: Sequence[int]) -> "Window":
        """The same part of an array that is `factors` times as large.

        >>> Window((1, 2), (3, 4)).scaled((2, 10))
        Window(start=(2, 20), stop=(6, 40))
        """
        return Window(_times(self.start, factors), _times(self.stop, factors))


@dataclass(frozen=True)
class Layout:
    """Which worker owns which part of an array: its output window.

    Attributes:
        shape: of the whole array.
        windows: one a rank; no two overlap and together they cover the array. Some may be empty.

    Raises:
        UsageError: if a position belongs to no worker or to two.
    """

    shape: tuple[int, ...]
    windows: tuple[Window, ...]

    def __post_init__(self) -> None:
        whole = Window.whole(self.shape)
        for rank, window in enumerate(self.windows):
            if len(window.shape) != len(self.shape) or not whole.contains(window):
                raise UsageError(
                    f"`windows[{rank}]` (={window}) is not in the array of shape {self.shape}."
                )
        for (one, first), (other, second) in combinations(enumerate(self.windows), 2):
            both = first.intersect(second)
            if both.num_positions:
                raise UsageError(
                    f"`windows[{one}]` and `windows[{other}]` both have {both}; each position "
                    "must have one owner."
                )
        missing = whole.num_positions - sum(window.num_positions for window in self.windows)
        if missing:
            raise UsageError(
                f"`windows` leave {missing} of the {whole.num_positions} positions of the array of "
                f"shape {self.shape} without an owner; let them cover it."
            )

    @classmethod
    def split(cls, shape: Sequence[int], grid: Sequence[int]) -> "Layout":
        """Cuts an array for a grid of workers, in parts that differ by one position at most.

        Args:
            shape: of the whole array.
            grid: workers in each dim; ranks count the last one fastest. Dims that it lacks are
                not cut.

        Raises:
            UsageError: if a dim has fewer positions than workers.

        >>> [window.start for window in Layout.split((5, 4), (2, 2)).windows]
        [(0, 0), (0, 2), (2, 0), (2, 2)]
        """
        if len(grid) > len(shape) or any(p < 1 for p in grid):
            raise UsageError(f"`grid` (={tuple(grid)}) does not fit an array of shape {shape}.")
        grid = (*grid, *(1,) * (len(shape) - len(grid)))
        for dim, (length, parts) in enumerate(zip(shape, grid, strict=True)):
            if length < parts:
                raise UsageError(
                    f"`grid` (={grid}) has {parts} workers in dim {dim}, where the array of shape "
                    f"{tuple(shape)} has {length} positions; use a smaller grid."
                )
        windows = []
        for place in product(*map(range, grid)):
            cuts = list(zip(place, shape, grid, strict=True))
            start = tuple(i * length // parts for i, length, parts in cuts)
            stop = tuple((i + 1) * length // parts for i, length, parts in cuts)
            windows.append(Window(start, stop))
        return cls(tuple(shape), tuple(windows))

    def scaled(self, factors: Sequence[int]) -> "Layout":
        """The same cut of an array that is `factors` times as large."""
        windows = tuple(window.scaled(factors) for window in self.windows)
        return Layout(_times(self.shape, factors), windows)


def _times(values: Sequence[int], factors: Sequence[int]) -> tuple[int, ...]:
    return tuple(value * factor for value, factor in zip(values, factors, strict=True))


def check_layout(name: str, value: object) -> None:
    """Refuses what is no layout, by the argument's name."""
    check_type(name, value, Layout, "`grid.split(shape)`, or the `out_layout` of a layer before")
