"""Checks for classes of torch whose modules take long to import, without importing them."""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


def loaded_class(module: str, name: str) -> Any:
    """A class for `isinstance`; an empty tuple if nothing has imported its module.

    >>> isinstance(3, loaded_class("no.such.module", "Number"))
    False
    """
    return getattr(sys.modules.get(module), name, ())


def is_dtensor(tensor: object) -> "TypeGuard[DTensor]":
    """Whether an object is a DTensor.

    >>> is_dtensor(3)
    False
    """
    return isinstance(tensor, loaded_class("torch.distributed.tensor", "DTensor"))


def local_part(tensor: "Tensor") -> "Tensor":
    """This worker's part of a DTensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def bounds_of(tensor: "Tensor") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and stop of this worker's part of a DTensor, by dimension; of another tensor, all."""
    if not is_dtensor(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(start), tuple(a + length for a, length in zip(start, shape, strict=True))


def is_first_copy(tensor: "DTensor") -> bool:
    """Whether this worker is the first in the tensor's mesh of those with the same part."""
    where = tensor.device_mesh.get_coordinate() or ()
    pairs = zip(tensor.placements, where, strict=True)
    return all(number == 0 for placement, number in pairs if placement.is_replicate())
