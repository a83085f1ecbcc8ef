"""What wire formats have not sent yet: by parameter, from plan to plan, and in checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import CheckpointError
from allstep.exchange.layout import BucketLayout
from allstep.exchange.wires import WireState

__all__ = ["gather_states", "give_back", "load_states", "refundable", "residual_pieces"]


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


@contextmanager
def refundable(
    layout: BucketLayout, state: WireState, names: Sequence[str]
) -> Iterator[dict[str, Tensor]]:
    """Afterwards holds what to add to residuals if nothing comes of some parameters' exchange.

    No worker may have a gradient for them. What was sent in vain of their residuals then has not
    been sent, and what was sent of a `p.grad` that stays as it is leaves nothing to be sent.
    """
    refunds: dict[str, Tensor] = {}
    if state.residual is None or not names:
        yield refunds
        return
    pieces = residual_pieces(layout, state)
    before = {name: pieces[name].clone() for name in names}
    yield refunds
    refunds |= {name: before[name].sub_(pieces[name]) for name in names}


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

    With as many workers as then each gets its own back; else each gets the mean of all, so that
    their mean over the workers, which is what will be sent, stays the same.

    Raises:
        CheckpointError: if there were other buckets.
    """
    own = saved[comm.rank] if len(saved) == comm.size else _mean_states(saved)
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


def _mean_states(states: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The mean residual of all workers, bucket by bucket; the rest is the same on all."""
    means = []
    for of_bucket in zip(*states, strict=True):
        residuals = [state["residual"] for state in of_bucket]
        mean = None if residuals[0] is None else torch.stack(residuals).mean(0)
        means.append({"residual": mean, "tensors": of_bucket[0]["tensors"]})
    return means
