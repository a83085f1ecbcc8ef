"""Sums over the workers among which a parameter is sharded."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from allstep.optim.leaves import Leaf

__all__ = ["reduce_over_shards"]


def reduce_over_shards(
    columns: Tensor, leaves: Sequence["Leaf"], op: Literal["sum", "max"]
) -> None:
    """Combines every leaf's column over the workers that hold its parts, in place.

    One collective for each dimension of the mesh that parameters are sharded over: one in all
    under `fully_shard` or tensor parallelism alone, none for whole parameters.

    Args:
        columns: shape (rows, leaves); finished for leaves that are whole.
        leaves: the same on all workers.
        op: how the parts combine; a "max" of something that holds NaN is inf.
    """
    members: dict[dist.ProcessGroup, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.is_sharded:
            for group in _groups_of(leaf.parameter):
                members.setdefault(group, []).append(index)
    reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    for group, indices in members.items():
        chosen = torch.tensor(indices, device=columns.device)
        parts = columns[:, chosen]
        if op == "max":
            parts = parts.nan_to_num(nan=math.inf, posinf=math.inf)  # Gloo's maximum loses NaN
        parts = parts.to(leaves[indices[0]].weight.device)  # whole ones may be elsewhere
        dist.all_reduce(parts, reduce_op, group=group)
        columns[:, chosen] = parts.to(columns.device)


def _groups_of(parameter: Tensor) -> list[dist.ProcessGroup]:
    """The process groups along which a parameter is cut, in the mesh's order."""
    assert isinstance(parameter, DTensor)
    return [
        parameter.device_mesh.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]
