"""A step's parameters as plain tensors: this worker's parts, in the update's precision."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from allstep.device import is_accelerator, tensor_on
from allstep.torch_classes import is_dtensor, local_part

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class ShardGroup(Protocol):
    """The workers that hold a parameter's parts, as `parameter.shard_group`; a `Communicator`."""

    def all_reduce(self, x: Tensor, op: Literal["sum", "max"], /) -> Tensor: ...


class ExactSquares(Protocol):
    """Sums squares of parts without rounding; held as `parameter.exact_squares`. Collective."""

    def sums_of_squares(self, parameters: Sequence[Tensor], parts: Sequence[Tensor], /) -> Tensor:
        """[len(parts)], float64, of the parameters' parts that all workers have."""


@dataclass(eq=False, slots=True)
class Leaf:
    """A parameter with a gradient.

    `weight` is what the update changes: this worker's part of the parameter, or of its float32
    master copy. `gradient` is this worker's part, in the dtype of the parameter. Norms of
    sharded leaves must be summed over workers.
    """

    name: str
    group: dict[str, Any]
    parameter: Tensor
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    is_sharded: bool

    @property
    def exact_squares(self) -> ExactSquares | None:
        """The exact sum for the parameter's norm; None if the norm may depend on the cuts."""
        return getattr(self.parameter, "exact_squares", None)

    def descent(self) -> Tensor:
        """The gradient of what is minimized, in the weight's dtype."""
        gradient = self.gradient.to(self.weight.dtype)
        return -gradient if self.group["maximize"] else gradient

    def flat(self, *slots: str) -> list[Tensor] | None:
        """Weight, gradient and the named slots as flat views of equal order.

        None if the weight's memory has holes. The gradient is copied if its order differs.
        """
        weight, gradient = self.weight, self.gradient
        if gradient.dtype != weight.dtype:
            gradient = gradient.to(weight.dtype)
        tensors = [weight, gradient]
        for slot in slots:
            tensors.append(local_part(self.state[slot]))
        rows = []
        for tensor in tensors:
            if not tensor.is_contiguous():
                return _flat_in_order(tensors)
            rows.append(tensor if tensor.dim() == 1 else tensor.view(-1))
        return rows

    def write_back(self) -> None:
        """Rounds the master copy into the parameter."""
        if "master" in self.state:
            local_part(self.parameter).copy_(self.weight)


@dataclass(eq=False, slots=True)
class Batch:
    """Leaves of one group that are updated together, with their intermediate results.

    `directions` are what the weights move against, and `weights` views of them that go with it.
    """

    leaves: list[Leaf]
    directions: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = [leaf.weight for leaf in self.leaves]

    @property
    def group(self) -> dict[str, Any]:
        """The options that the leaves share."""
        return self.leaves[0].group

    @property
    def device(self) -> torch.device:
        """The leaves' device."""
        return self.leaves[0].weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the leaves are updated."""
        return self.leaves[0].weight.dtype

    def flats(self, *slots: str) -> list[list[Tensor]] | None:
        """Weights, gradients and slots of the leaves, each as a list of flat tensors.

        Gradients have the weights' dtype. None if a weight is not dense, or a shard of exact sums
        on a CPU, where torch's fused kernels round a tensor's last elements otherwise than others.
        """
        if self.leaves[0].exact_squares is not None and not is_accelerator(self.device):
            return None
        rows = [leaf.flat(*slots) for leaf in self.leaves]
        dense = [row for row in rows if row is not None]
        if len(dense) < len(rows):
            return None
        return [list(column) for column in zip(*dense, strict=True)]


def batches(leaves: Iterable[Leaf], max_elements: int) -> Iterator[Batch]:
    """Batches of consecutive leaves of one group and kind; on a CPU limited in size.

    A batch that fits a CPU's cache is measured and moved there. Elsewhere each kernel that is
    launched takes time, and a batch may be all of a group.
    """
    batch: list[Leaf] = []
    num_elements = 0
    for leaf in leaves:
        weight, size = leaf.weight, leaf.weight.numel()
        fits = batch and (
            (num_elements + size <= max_elements or is_accelerator(weight.device))
            and leaf.group is batch[0].group
            and weight.device == batch[0].weight.device
            and weight.dtype == batch[0].weight.dtype
            and (leaf.exact_squares is None) == (batch[0].exact_squares is None)
        )
        if batch and not fits:
            yield Batch(batch)
            batch, num_elements = [], 0
        batch.append(leaf)
        num_elements += size
    if batch:
        yield Batch(batch)


def local_gradient(parameter: Tensor) -> Tensor:
    """This worker's part of the gradient, laid out over the workers as the parameter is."""
    gradient = parameter.grad
    assert gradient is not None
    if (
        is_dtensor(parameter)
        and is_dtensor(gradient)
        and gradient.placements != parameter.placements
    ):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def _flat_in_order(tensors: list[Tensor]) -> list[Tensor] | None:
    """`flat` for weights that are dense in another order, such as channels-last."""
    weight, gradient, *slots = tensors
    if gradient.stride() != weight.stride():
        gradient = torch.empty_like(weight).copy_(gradient)
    tensors = [weight, gradient, *slots]
    if any(tensor.stride() != weight.stride() for tensor in tensors):
        return None
    rows = [flat(tensor) for tensor in tensors]
    return [row for row in rows if row is not None] if rows[0] is not None else None


def is_sharded(parameter: Tensor) -> bool:
    """Whether other workers hold other parts of the parameter."""
    return bool(_shard_groups(parameter))


def flat(tensor: Tensor) -> Tensor | None:
    """A dense tensor's memory as one row, in any order of its dimensions; None if not dense."""
    if tensor.is_contiguous():
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor.as_strided((tensor.numel(),), (1,))
    return None


def update_dtype(parameter: Tensor) -> torch.dtype:
    """The precision in which a parameter is updated."""
    return torch.float32 if parameter.dtype in _LOW_PRECISION else parameter.dtype


def new_state(parameter: Tensor, slots: Iterable[str]) -> dict[str, Tensor]:
    """An optimizer's state of a parameter before its first step.

    Parameters of half precision get a float32 `master` copy, and slots of its dtype.
    """
    state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
    weight = parameter.detach().to(update_dtype(parameter))
    if weight.dtype != parameter.dtype:
        state["master"] = weight
    for slot in slots:
        state[slot] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return state


def reduce_over_shards(columns: Tensor, leaves: Sequence[Leaf], op: Literal["sum", "max"]) -> None:
    """Combines each leaf's column over the workers that hold its parts, in place.

    One collective for each dimension of the mesh that parameters are sharded over: one in all
    under `fully_shard` or under tensor parallelism, none for whole parameters. Those are sharded
    that are DTensors, or have a `ShardGroup`.

    Args:
        columns: shape (rows, leaves); finished for leaves that are whole. A "sum" is finished over
            FSDP2's workers, where it is of exact squares.
        leaves: the same on all workers.
        op: how the parts combine; a "max" of something that holds NaN is inf.
    """
    members: dict[dist.ProcessGroup | ShardGroup, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.is_sharded:
            is_added_up = op == "sum" and leaf.exact_squares is not None
            for group in _shard_groups(leaf.parameter, with_mesh=not is_added_up):
                members.setdefault(group, []).append(index)
    for group, indices in members.items():
        chosen = tensor_on(columns.device, indices)
        parts = columns[:, chosen]
        if op == "max":
            parts = parts.nan_to_num(nan=math.inf, posinf=math.inf)  # Gloo's maximum loses NaN
        parts = parts.to(leaves[indices[0]].weight.device)  # whole ones may be elsewhere
        columns[:, chosen] = _all_reduce(parts, op, group).to(columns.device)


def _all_reduce(
    x: Tensor, op: Literal["sum", "max"], group: dist.ProcessGroup | ShardGroup
) -> Tensor:
    if not isinstance(group, dist.ProcessGroup):
        return group.all_reduce(x, op)
    dist.all_reduce(x, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=group)
    return x


def _shard_groups(
    parameter: Tensor, *, with_mesh: bool = True
) -> Sequence[dist.ProcessGroup | ShardGroup]:
    """The workers over which a parameter is cut; a DTensor's groups first, in its mesh's order."""
    groups: list[dist.ProcessGroup | ShardGroup] = []
    if with_mesh and is_dtensor(parameter):
        groups += [
            parameter.device_mesh.get_group(dim)
            for dim, placement in enumerate(parameter.placements)
            if not placement.is_replicate()
        ]
    if hasattr(parameter, "shard_group"):
        groups.append(parameter.shard_group)
    return groups
