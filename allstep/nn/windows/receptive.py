"""On paper: which input positions outputs depend on, and which outputs need no neighbour."""

from collections.abc import Sequence
from dataclasses import dataclass

from allstep.errors import UsageError
from allstep.nn.windows.window import Window


def pair(name: str, value: int | Sequence[int], minimum: int) -> tuple[int, int]:
    """An argument for height and width, as torch's layers take it.

    >>> pair("stride", 2, minimum=1)
    (2, 2)
    """
    values = (value, value) if isinstance(value, int) else value
    values = tuple(values) if isinstance(values, Sequence) else ()
    if len(values) != 2 or not all(isinstance(v, int) and v >= minimum for v in values):
        raise UsageError(
            f"`{name}` (={value!r}) must be an int of at least {minimum}, or two of them."
        )
    return values


@dataclass(frozen=True)
class Reach:
    """How far the receptive field of an output reaches, in each dim.

    output o depends on inputs o * stride - padding + dilation * (0, ..., kernel - 1)

    Attributes:
        kernel: positions of a receptive field.
        stride: positions between two receptive fields.
        padding: positions before the array and after it.
        dilation: positions between two of a receptive field's.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    def out_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        """How many outputs there are.

        Raises:
            UsageError: if the receptive field is larger than the padded array.

        >>> Reach((3,), (2,), ((1, 1),), (1,)).out_shape((10,))
        (5,)
        """
        sizes = []
        for dim, length in enumerate(in_shape):
            padded = length + sum(self.padding[dim])
            if self.extent(dim) > padded:
                raise UsageError(
                    f"`kernel_size` (={self.kernel}) reaches over {self.extent(dim)} positions in "
                    f"dim {dim}, where the padded array has {padded}; use a smaller one."
                )
            sizes.append((padded - self.extent(dim)) // self.stride[dim] + 1)
        return tuple(sizes)

    def extent(self, dim: int) -> int:
        """Positions from a receptive field's first to its last."""
        return self.dilation[dim] * (self.kernel[dim] - 1) + 1

    def inputs(self, outputs: Window) -> Window:
        """The smallest window with the receptive fields of all these outputs.

        >>> Reach((3,), (2,), ((1, 1),), (1,)).inputs(Window((0,), (2,)))
        Window(start=(-1,), stop=(4,))
        """
        if not outputs.num_positions:
            return Window.whole((0,) * len(outputs.shape))
        start, stop = [], []
        for dim, (first, end) in enumerate(zip(outputs.start, outputs.stop, strict=True)):
            offset = -self.padding[dim][0]
            start.append(first * self.stride[dim] + offset)
            stop.append((end - 1) * self.stride[dim] + offset + self.extent(dim))
        return Window(tuple(start), tuple(stop))

    def inner(self, outputs: Window, own: Window, shape: Sequence[int]) -> Window:
        """Those of the outputs whose receptive fields lie in `own`, or outside of the array.

        >>> Reach((3,), (1,), ((1, 1),), (1,)).inner(Window((0,), (5,)), Window((0,), (5,)), (10,))
        Window(start=(0,), stop=(4,))
        """
        start, stop = [], []
        for dim, (first, end) in enumerate(zip(outputs.start, outputs.stop, strict=True)):
            stride, before = self.stride[dim], self.padding[dim][0]
            if own.start[dim] > 0:  # the first output whose first input is not before `own`
                first = max(first, -(-(own.start[dim] + before) // stride))
            if own.stop[dim] < shape[dim]:  # and the end of those whose last is not after it
                end = min(end, (own.stop[dim] + before - self.extent(dim)) // stride + 1)
            start.append(first)
            stop.append(max(first, end))
        inner = Window(tuple(start), tuple(stop))
        return inner if inner.num_positions else Window(outputs.start, outputs.start)


def around(outer: Window, inner: Window) -> tuple[Window, ...]:
    """What is left of a window of two dims without an inner one: above, left, right, below.

    >>> around(Window((0, 0), (4, 4)), Window((1, 0), (3, 3)))
    (Window(start=(0, 0), stop=(1, 4)), Window(start=(1, 0), stop=(3, 0)),
     Window(start=(1, 3), stop=(3, 4)), Window(start=(3, 0), stop=(4, 4)))
    """
    (top, left), (bottom, right) = outer.start, outer.stop
    (inner_top, inner_left), (inner_bottom, inner_right) = inner.start, inner.stop
    return (
        Window((top, left), (inner_top, right)),
        Window((inner_top, left), (inner_bottom, inner_left)),
        Window((inner_top, inner_right), (inner_bottom, right)),
        Window((inner_bottom, left), (bottom, right)),
    )
