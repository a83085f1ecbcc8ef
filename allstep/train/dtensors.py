"""Converts torch's DTensors to and from the divided tensors that a checkpoint stores in pieces."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.nn import DividedTensor, Window
from allstep.torch_classes import bounds_of, is_dtensor
from allstep.train.devices import map_tensors
from allstep.train.packing import tensors_in

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def divide_dtensors(state: Any, comm: Communicator) -> Any:
    """The state with divided tensors in place of DTensors. Collective.

    Args:
        state: as `Checkpoints.save` takes it, on every worker.
        comm: all workers.

    Raises:
        UsageError: if a DTensor is on workers outside of `comm`, or has partial placements.
    """
    found = {name: x for name, x in tensors_in(state).items() if is_dtensor(x)}
    if not found:
        return state
    for name, x in found.items():
        _check(name, x, comm)
    by_rank = comm.all_gather_object([bounds_of(x) for x in found.values()])
    divided = {
        id(x): _divided(name, x, bounds, comm)
        for (name, x), *bounds in zip(found.items(), *by_rank, strict=True)
    }
    return map_tensors(state, lambda x: divided.get(id(x), x))


def cut_dtensors(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """This worker's parts of whole tensors, as views, where the model has DTensors.

    Args:
        model: some of whose parameters may be DTensors.
        tensors: name in the model's state dict -> whole tensor; unfit tensors stay as they are.
    """
    like = {name: x for name, x in model.state_dict().items() if is_dtensor(x)}
    return {name: cut_dtensor(x, like[name]) if name in like else x for name, x in tensors.items()}


def lay_out(model_state: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts from `cut_dtensors` as DTensors like those of the model's state dict."""
    return {name: laid_out(x, model_state.get(name)) for name, x in parts.items()}


def cut_dtensor(value: Any, like: Any) -> Any:
    """This worker's part of a whole tensor, with the layout of the DTensor `like`: a view."""
    if not is_dtensor(like) or is_dtensor(value) or not isinstance(value, Tensor):
        return value
    if value.shape != like.shape:
        return value
    start, stop = bounds_of(like)
    return value[tuple(map(slice, start, stop))]


def laid_out(value: Any, like: Any) -> Any:
    """The DTensor whose local part is `value`; `value` itself if `like` is not a DTensor."""
    if not is_dtensor(like) or is_dtensor(value) or not isinstance(value, Tensor):
        return value
    start, stop = bounds_of(like)
    if [b - a for a, b in zip(start, stop, strict=True)] != list(value.shape):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(like.device).contiguous(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _check(name: str, x: "DTensor", comm: Communicator) -> None:
    mesh = x.device_mesh
    if not set(mesh.mesh.flatten().tolist()) <= set(range(comm.size)):  # others have copies
        raise UsageError(
            f"`state` holds a DTensor at `{name}` on a mesh of {mesh.size()} workers, and the"
            f" checkpoint is of {comm.size}; give `x.full_tensor()` of it."
        )
    if any(placement.is_partial() for placement in x.placements):
        raise UsageError(
            f"`state` holds a DTensor at `{name}` that is a sum over workers not made yet"
            f" ({x.placements}); give `x.redistribute(…)` of it."
        )


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
