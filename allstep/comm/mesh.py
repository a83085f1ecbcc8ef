"""Named axes over a group of workers, such as one for data and one for the parts of a model."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from math import prod
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from allstep.comm.agreement import agree
from allstep.comm.group import WorkerGroup
from allstep.errors import UsageError

C = TypeVar("C", bound=WorkerGroup)


class Mesh(Generic[C]):
    """Workers in an array with named axes; `Communicator.mesh` makes it.

    The last axis varies fastest, as in torch's DeviceMesh: with `data=2, model=2` ranks 0 and 1
    share one model, and ranks 0 and 2 hold the same part of it.

    Args:
        comm: the workers.
        axes: name -> length, slowest axis first.
        split: color, key -> the communicator of this worker's group.

    Attributes:
        comm: the workers.
        shape: name -> length.
        coordinates: name -> this worker's coordinate on the axis, which is its rank in
            `mesh[name]`.

    Raises:
        UsageError: if the axes don't multiply to the number of workers.
        DisagreementError: if the axes differ between workers.
    """

    def __init__(
        self, comm: C, axes: Mapping[str, int], split: Callable[[int, int], C | None]
    ) -> None:
        agree(comm, f"make a mesh of {dict(axes)}", fault=_fault(axes, comm.size))
        self.comm = comm
        self.shape = dict(axes)
        self.coordinates = self.coordinates_of(comm.rank)
        self._axes: dict[str, C] = {}
        for name, length in self.shape.items():
            if length == comm.size:
                self._axes[name] = comm  # reuses its connections
                continue
            first = {**self.coordinates, name: 0}
            color = np.ravel_multi_index(tuple(first.values()), tuple(self.shape.values()))
            axis = split(int(color), self.coordinates[name])
            assert axis is not None
            self._axes[name] = axis
        self._device_mesh: DeviceMesh | None = None

    def __getitem__(self, name: str) -> C:
        """The communicator of the workers along an axis, including this one.

        Raises:
            UsageError: if there is no such axis.
        """
        if name not in self._axes:
            listed = ", ".join(map(repr, self._axes))
            raise UsageError(f"`name` (={name!r}) is no axis of the mesh; choose one of {listed}.")
        return self._axes[name]

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """name -> coordinate on that axis of the worker with the given rank."""
        places = np.unravel_index(rank, tuple(self.shape.values()))
        return dict(zip(self.shape, map(int, places), strict=True))

    def device_mesh(self) -> DeviceMesh:
        """The same axes as a DeviceMesh, for FSDP2 and the like. Collective.

        For one axis use `mesh.device_mesh()["model"]`. The first call makes its groups: torch's
        own, with the communicator's timeout and separate connections, even along an axis of all
        workers.

        Raises:
            UsageError: if the workers are not exactly those of torch.distributed's default group.
        """
        if self._device_mesh is None:
            size = dist.get_world_size() if dist.is_initialized() else 0
            if size != self.comm.size:
                raise UsageError(
                    f"`device_mesh` needs torch.distributed's default group to be these"
                    f" {self.comm.size} workers, and it has {size}; make the mesh of what"
                    " `allstep.init()` returned under a launcher."
                )
            ranks = torch.arange(self.comm.size).view(*self.shape.values())
            timeout = timedelta(seconds=self.comm.timeout_s)
            groups = []
            for dim, length in enumerate(ranks.shape):
                lines = ranks.movedim(dim, -1).reshape(-1, length).tolist()
                made = dist.new_subgroups_by_enumeration(lines, timeout)  # type: ignore[no-untyped-call]
                groups.append(made[0])
            self._device_mesh = DeviceMesh.from_group(
                groups, self.comm.device.type, ranks, mesh_dim_names=tuple(self.shape)
            )
        return self._device_mesh

    def __deepcopy__(self, memo: dict[int, object]) -> "Mesh[C]":
        return self  # a copied module keeps the mesh

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={length}" for name, length in self.shape.items())
        return f"Mesh({axes}, rank={self.comm.rank})"


def _fault(axes: Mapping[str, int], size: int) -> str | None:
    """Why the axes do not fit the number of workers.

    >>> _fault({"data": 2, "model": 3}, 4)
    'data=2 x model=3 are 6 workers, and there are 4; choose lengths whose product is 4.'
    """
    cure = f"choose lengths whose product is {size}."
    if not axes:
        return f"`axes` is empty: {cure}"
    for name, length in axes.items():
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            return f"`{name}` (={length!r}) must be an int of at least 1; {cure}"
    if prod(axes.values()) == size:
        return None
    product = " x ".join(f"{name}={length}" for name, length in axes.items())
    return f"{product} are {prod(axes.values())} workers, and there are {size}; {cure}"
