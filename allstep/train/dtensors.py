"""Torch's distributed tensors as those that a checkpoint takes in pieces."""

import math
from typing import TYPE_CHECKING, Any

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.nn import DividedTensor, Window
from allstep.torch_classes import is_dtensor
from allstep.train.devices import map_tensors
from allstep.train.packing import tensors_in

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def divide_dtensors(state: Any, comm: Communicator) -> Any:
    """The state with divided tensors in place of DTensors, which all workers have. Collective.

    Args:
        state: as `Checkpoints.save` takes it.
        comm: all workers.

    Raises:
        UsageError: if a DTensor lies on other workers, or is a sum that has not been made.
    """
    found = {name: x for name, x in tensors_in(state).items() if is_dtensor(x)}
    if not found:
        return state
    for name, x in found.items():
        _check(name, x, comm)
    by_rank = comm.all_gather_object([_bounds(x) for x in found.values()])
    divided = {
        id(x): _divided(name, x, bounds, comm)
        for (name, x), *bounds in zip(found.items(), *by_rank, strict=True)
    }
    return map_tensors(state, lambda x: divided.get(id(x), x))


def _check(name: str, x: "DTensor", comm: Communicator) -> None:
    mesh = x.device_mesh
    if sorted(mesh.mesh.flatten().tolist()) != list(range(comm.size)):
        raise UsageError(
            f"`state` holds a DTensor at `{name}` on a mesh of {mesh.size()} workers, and the"
            f" checkpoint is of {comm.size}; give `x.full_tensor()` of it."
        )
    if any(placement.is_partial() for placement in x.placements):
        raise UsageError(
            f"`state` holds a DTensor at `{name}` that is a sum over workers not made yet"
            f" ({x.placements}); give `x.redistribute(…)` of it."
        )


def _bounds(x: "DTensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and stop of this worker's part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(start), tuple(a + length for a, length in zip(start, shape, strict=True))


def _divided(name: str, x: "DTensor", bounds: Any, comm: Communicator) -> Any:
    windows = [Window(tuple(start), tuple(stop)) for start, stop in bounds]
    num_positions = sum(window.num_positions for window in set(windows))
    if num_positions != math.prod(x.shape):
        raise UsageError(
            f"`state` holds a DTensor at `{name}` with placements {x.placements} whose parts are"
            " no boxes; give `x.full_tensor()` of it."
        )
    local = x.to_local()
    if not x.dim():
        return local
    return DividedTensor(local, tuple(x.shape), x.dtype, windows, comm)
