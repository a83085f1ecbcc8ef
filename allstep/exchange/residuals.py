"""What wire formats have not sent yet: by parameter, from plan to plan, and in checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import CheckpointError
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires import WireState

__all__ = [
    "Remembered",
    "gather_states",
    "give_back",
    "load_states",
    "remember",
    "residual_pieces",
    "restore",
]

Remembered = tuple[Tensor, Tensor, Tensor]  # a residual, what it was before, a flag


def residual_pieces(layout: BucketLayout, state: WireState) -> dict[str, Tensor]:
    """name -> its slice of a bucket's residual; empty for formats without."""
    if state.residual is None:
        return {}
    pieces = state.residual.split_with_sizes(list(layout.sizes))
    return dict(zip(layout.names, pieces, strict=True))


def give_back(layout: BucketLayout, state: WireState, residuals: Mapping[str, Tensor]) -> set[str]:
    """Takes over residuals of parameters that were in other buckets.

    Args:
        layout, state: the bucket's.
        residuals: by parameter.

    Returns:
        The parameters that got theirs.
    """
    given = set()
    for name, piece in residual_pieces(layout, state).items():
        if name in residuals and residuals[name].shape == piece.shape:
            piece.copy_(residuals[name])
            given.add(name)
    return given


def remember(
    layout: BucketLayout, state: WireState, flags: Mapping[str, Tensor]
) -> list[Remembered]:
    """For `restore`, before a bucket is summed: some parameters' residuals, and their flags.

    Args:
        layout, state: the bucket's.
        flags: name -> the flag in the buckets' tail that will tell whether any worker has a
            gradient for it.
    """
    if state.residual is None or not flags:
        return []
    pieces = residual_pieces(layout, state)
    return [(pieces[name], pieces[name].clone(), flag) for name, flag in flags.items()]


def restore(remembered: Sequence[Remembered]) -> None:
    """Residuals of parameters that no worker has a gradient for are again as they were.

    What was sent of them, and of an earlier gradient in `p.grad`, is used by nobody.
    """
    for residual, before, flag in remembered:
        residual.copy_(torch.where(flag > 0, residual, before))


def gather_states(comm: Communicator, states: Sequence[WireState]) -> list[Any] | None:
    """All workers' states of their buckets, on rank 0; None elsewhere. Collective if there are any.

    Args:
        comm: the workers.
        states: this worker's, one a bucket.
    """
    found = [tensor for state in states for tensor in (state.residual, *state.tensors.values())]
    tensors = tuple(tensor for tensor in found if tensor is not None)
    gathered = comm.gather(tensors, root=0) if tensors else None
    return None if gathered is None else [_rebuilt(states, iter(each)) for each in gathered]


def load_states(
    comm: Communicator, states: Sequence[WireState], saved: Sequence[Sequence[dict[str, Any]]]
) -> None:
    """Goes on where `gather_states` was called.

    Each gets its own back if the number of workers is the same; else an equal part of their sum,
    which is what will be sent.

    Raises:
        CheckpointError: if there were other buckets.
    """
    own = saved[comm.rank] if len(saved) == comm.size else _equal_parts(saved, comm.size)
    if len(own) != len(states):
        raise CheckpointError(
            f"The checkpoint has wire states for {len(own)} buckets, the plan has {len(states)}:"
            " it belongs to another exchange."
        )
    for state, of_bucket in zip(states, own, strict=True):
        if state.residual is not None and of_bucket["residual"] is not None:
            state.residual.copy_(of_bucket["residual"])
        for key, tensor in of_bucket["tensors"].items():
            state.tensors[key] = tensor.clone()


def _rebuilt(like: Sequence[WireState], tensors: Iterator[Tensor]) -> list[dict[str, Any]]:
    return [
        {
            "residual": None if state.residual is None else next(tensors),
            "tensors": {key: next(tensors) for key in state.tensors},
        }
        for state in like
    ]


def _equal_parts(states: Sequence[Sequence[dict[str, Any]]], size: int) -> list[dict[str, Any]]:
    """A `size`th of all workers' residuals, bucket by bucket; the rest is the same on all."""
    parts = []
    for of_bucket in zip(*states, strict=True):
        residuals = [state["residual"] for state in of_bucket]
        part = None if residuals[0] is None else torch.stack(residuals).sum(0) / size
        parts.append({"residual": part, "tensors": of_bucket[0]["tensors"]})
    return parts
