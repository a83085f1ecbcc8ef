"""Algorithms that sum a tensor over ranks; see `ALGORITHMS`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from allstep.comm.algorithms.auto import Auto
from allstep.comm.algorithms.base import AllReduce
from allstep.comm.algorithms.base import Messenger as Messenger
from allstep.comm.algorithms.doubling import HalvingDoubling, RecursiveDoubling
from allstep.comm.algorithms.native import Dummy, Native
from allstep.comm.algorithms.nodes import Hierarchical, TwoDimensional
from allstep.comm.algorithms.ring import Ring
from allstep.comm.algorithms.shared import SharedMemory
from allstep.comm.group import WorkerGroup
from allstep.device import is_accelerator
from allstep.errors import check_choice

__all__ = [
    "ALGORITHMS",
    "AllReduce",
    "Auto",
    "Dummy",
    "HalvingDoubling",
    "Hierarchical",
    "Native",
    "RecursiveDoubling",
    "Ring",
    "SharedMemory",
    "TwoDimensional",
    "check_algorithm",
    "make_algorithm",
    "default_algorithm",
]

ALGORITHMS: Mapping[str, type[AllReduce]] = {
    kind.name: kind
    for kind in (
        Native,
        Ring,
        HalvingDoubling,
        RecursiveDoubling,
        Hierarchical,
        TwoDimensional,
        SharedMemory,
        Dummy,
        Auto,
    )
}


def make_algorithm(
    algorithm: str | Callable[[Any], AllReduce] | None,
    comm: WorkerGroup,
    dtype: torch.dtype = torch.float32,
    num_at_once: int = 1,
) -> AllReduce:
    """Makes an algorithm for the ranks of `comm`; all of them must make it.

    Args:
        algorithm: a name in `ALGORITHMS`, or a function that makes an algorithm from a
            communicator, such as `lambda comm: Ring(comm, order=(0, 2, 1))`; None for
            `default_algorithm`.
        comm: the ranks.
        dtype: dtype of most tensors.
        num_at_once: number of tensors that are summed at once, for the measurements of `Auto`.

    Raises:
        UsageError: if the name is unknown, or the algorithm does not suit the ranks' nodes.
    """
    if algorithm is None:
        algorithm = default_algorithm(comm, dtype)
    if not isinstance(algorithm, str):
        return algorithm(comm)
    check_algorithm(algorithm)
    if algorithm == Auto.name:
        return Auto(comm, dtype, num_at_once)
    return ALGORITHMS[algorithm](comm)


def default_algorithm(comm: WorkerGroup, dtype: torch.dtype = torch.float32) -> str:
    """The name of the algorithm that suits the ranks' machines.

    It is the backend's own, with two exceptions for CPU ranks:

    - ranks of one host use shared memory;
    - two ranks that sum 16-bit numbers use recursive doubling: Gloo would add such numbers one by
      one in software.

    >>> from allstep.comm import Communicator
    >>> default_algorithm(Communicator.single_process())
    'native'
    """
    if not is_accelerator(comm.device) and comm.size > 1:
        if comm.num_nodes == 1:
            return SharedMemory.name
        if comm.size == 2 and dtype.itemsize == 2:
            return RecursiveDoubling.name
    return Native.name


def check_algorithm(algorithm: str) -> None:
    """Raises UsageError unless `algorithm` is in `ALGORITHMS`."""
    check_choice("algorithm", algorithm, ALGORITHMS)
