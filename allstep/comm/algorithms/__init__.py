"""Ways to sum a tensor over ranks; see `ALGORITHMS`."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from allstep.comm.algorithms.auto import Auto
from allstep.comm.algorithms.base import AllReduce
from allstep.comm.algorithms.halving_doubling import HalvingDoubling
from allstep.comm.algorithms.native import Dummy, Native
from allstep.comm.algorithms.nodes import Hierarchical, TwoDimensional
from allstep.comm.algorithms.ring import Ring
from allstep.comm.algorithms.shared import SharedMemory, default_algorithm
from allstep.errors import UsageError, nearest_names

if TYPE_CHECKING:
    from allstep.comm.communicator import Communicator

__all__ = [
    "ALGORITHMS",
    "AllReduce",
    "Auto",
    "Dummy",
    "HalvingDoubling",
    "Hierarchical",
    "Native",
    "Ring",
    "SharedMemory",
    "TwoDimensional",
    "check_algorithm",
    "make_algorithm",
]

ALGORITHMS: Mapping[str, type[AllReduce]] = {
    kind.name: kind
    for kind in (
        Native,
        Ring,
        HalvingDoubling,
        Hierarchical,
        TwoDimensional,
        SharedMemory,
        Dummy,
        Auto,
    )
}


def make_algorithm(
    algorithm: "str | Callable[[Communicator], AllReduce] | None", comm: "Communicator"
) -> AllReduce:
    """An algorithm for the ranks of `comm`; all of them must make it.

    Args:
        algorithm: a name in `ALGORITHMS`, or what makes one of a communicator, such as
            `lambda comm: Ring(comm, order=(0, 2, 1))`; None for shared memory between CPU
            ranks of one host, and the backend's own otherwise.
        comm: the ranks.

    Raises:
        UsageError: if the name is unknown, or the algorithm does not suit the ranks' nodes.
    """
    if algorithm is None:
        return default_algorithm(comm)
    if not isinstance(algorithm, str):
        return algorithm(comm)
    check_algorithm(algorithm)
    return ALGORITHMS[algorithm](comm)


def check_algorithm(algorithm: str) -> None:
    """Raises UsageError unless `algorithm` is in `ALGORITHMS`."""
    if algorithm not in ALGORITHMS:
        raise UsageError(
            f"`algorithm` (={algorithm!r}) is unknown; {nearest_names(str(algorithm), ALGORITHMS)}"
        )
