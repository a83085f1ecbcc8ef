"""The states of several exchanges, each of another part of a model that is divided on a mesh."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from allstep.comm import Communicator, parts_along_axes
from allstep.errors import CheckpointError
from allstep.exchange import Exchange

State = dict[str, Any]
T = TypeVar("T")


def gather_exchange(exchange: Exchange) -> State | None:
    """The states of the exchanges of all parts of a copy of the model, on rank 0. Collective."""
    state, parts = exchange.state_dict(), parts_along_axes(exchange.model)
    if not parts:
        return state
    mesh, axes = parts[0].mesh, {part.axis for part in parts}
    is_copy = any(place for axis, place in mesh.coordinates.items() if axis not in axes)
    gathered = mesh.comm.gather_object(None if is_copy else state)
    if gathered is None:
        return None
    return {"parts": [found for found in gathered if found is not None]}


def own_exchange(exchange: Exchange, state: State, trained: Mapping[str, bool]) -> State:
    """The state that this worker's exchange continues from: its own, or one of equal parameters.

    Where shards are cut differently now, the names are the same, and bucket sizes and the grid of
    exact sums adapt. Where stages are placed differently, only what is stored by name is used.

    Args:
        exchange: the exchange to continue.
        state: what `gather_exchange` returned.
        trained: name -> whether a parameter was trained then, if that may have changed.
    """
    parts: list[State] = state.get("parts", [state])
    own = {
        name
        for name, _ in exchange.model.named_parameters()
        if trained.get(name, name in exchange.trained) and name not in exchange.divided
    }
    same = [part for part in parts if own == set(chain.from_iterable(part.get("buckets") or ()))]
    if own and same:  # gradients that FSDP2 sums are in no bucket
        copy_workers = next((shard.comm for shard in exchange.shards.values()), None)
        return _at_place(same, copy_workers)
    if len(parts) == 1 and not parts_along_axes(exchange.model):
        return parts[0]
    return _of_names(parts, exchange)


def _at_place(found: Sequence[T], workers: Communicator | None) -> T:
    """This worker's state among those of workers with shards of the same parameters."""
    if workers is None or len(found) != workers.size:
        return found[0]
    return found[workers.rank]


def _of_names(parts: Sequence[State], exchange: Exchange) -> State:
    """A state without buckets.

    Raises:
        CheckpointError: if something of a bucket waits to be sent or used.
    """
    if any(map(_has_gradients, parts)):
        raise CheckpointError(
            "The checkpoint has gradients that were not sent or not used yet, of stages that lay on"
            " other workers: resume with as many workers along the pipeline, and its schedule."
        )
    state = {**parts[0], "buckets": []}
    if parts[0].get("grid"):
        tops = [part["grid"]["tops"] for part in parts]
        own = {}
        for name in exchange.with_gradients:
            shard = exchange.shards.get(name)
            if found := [known[name] for known in tops if name in known]:
                own[name] = _at_place(found, None if shard is None else shard.comm)
        state["grid"] = {"tops": own}
    return state


def _has_gradients(state: Mapping[str, Any]) -> bool:
    averaging = state.get("averaging") or {}
    waiting = (state.get("residuals"), state.get("in_flight"))
    return any(waiting) or bool(averaging.get("anchors") or averaging.get("momenta"))
