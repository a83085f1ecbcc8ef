"""Workers in rows and columns, each with a part of every array."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isqrt, prod

from allstep.comm import Communicator
from allstep.comm.agreement import agree
from allstep.comm.batched_send_recv import BatchedSendRecv
from allstep.errors import UsageError, check_type
from allstep.nn.windows.plan import HaloStats
from allstep.nn.windows.window import Layout


class Grid:
    """The workers of a communicator in a grid; ranks count along rows.

    All workers make the same grid, and the same layers on it.

    Args:
        comm: the workers.
        shape: rows and columns, or one number for rows only; their product is `comm.size`. None
            for as many rows as columns, or nearly: (2, 2) for 4 workers, (3, 2) for 6.

    Attributes:
        comm, rank, size: the communicator, this worker's number and how many there are.
        shape: rows and columns.
        parcels: carries the messages of halo exchanges.
        stats: the messages of all halo exchanges of this worker, forward and backward.

    Raises:
        UsageError: if `shape` has another number of workers.
        DisagreementError: if workers pass other shapes.

    >>> grid = Grid(Communicator.single_process())
    >>> grid.shape, grid.split((8, 6)).windows
    ((1, 1), (Window(start=(0, 0), stop=(8, 6)),))
    """

    def __init__(self, comm: Communicator, shape: Sequence[int] | None = None) -> None:
        check_type("comm", comm, Communicator, "that of `allstep.init()`, or of an axis of a mesh")
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.parcels = BatchedSendRecv(comm)
        self.stats = HaloStats()
        self._agreed: set[str] = set()
        self.shape = nearest_square(comm.size) if shape is None else _numbers(shape)
        with self.together(f"Grid of shape {self.shape}"):
            if prod(self.shape) != comm.size or any(p < 1 for p in self.shape):
                raise UsageError(
                    f"`shape` (={self.shape}) has {prod(self.shape)} workers, the communicator "
                    f"{comm.size}; use {nearest_square(comm.size)} or None."
                )

    def split(self, shape: Sequence[int]) -> Layout:
        """An array cut evenly for these workers.

        Raises:
            UsageError: if a dim has fewer positions than workers.
        """
        return Layout.split(shape, self.shape)

    def agree(self, wanted: str, fault: str | None = None) -> None:
        """Compares what all workers are about to do, once for each text, before they do it.

        Args:
            wanted: the same text on all workers.
            fault: why this worker cannot.

        Raises:
            UsageError: with `fault`.
            DisagreementError: if another worker wants something else, or cannot.
        """
        if fault is not None or wanted not in self._agreed:
            agree(self.comm, wanted, fault=fault)
            self._agreed.add(wanted)

    @contextmanager
    def together(self, wanted: str) -> Iterator[None]:
        """Runs a check that all workers make; what one of them refuses none goes on with."""
        try:
            yield
        except UsageError as error:
            self.agree(wanted, str(error))
        self.agree(wanted)

    def __deepcopy__(self, memo: dict[int, object]) -> "Grid":
        return self  # a copy of a layer is on the same workers

    def __repr__(self) -> str:
        return f"Grid(shape={self.shape}, rank={self.rank})"


def _numbers(shape: Sequence[int]) -> tuple[int, ...]:
    values = tuple(shape) if isinstance(shape, Sequence) else ()
    if not values or not all(isinstance(n, int) for n in values):
        raise UsageError(f"`shape` (={shape!r}) must be rows and columns, such as (2, 1), or None.")
    return values


def nearest_square(size: int) -> tuple[int, int]:
    """Rows and columns of the same number of workers, not fewer rows than columns.

    >>> nearest_square(6), nearest_square(7), nearest_square(16)
    ((3, 2), (7, 1), (4, 4))
    """
    columns = next(n for n in range(isqrt(size), 0, -1) if size % n == 0)
    return size // columns, columns
