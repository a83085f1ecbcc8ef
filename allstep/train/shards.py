"""What training does differently where workers share a copy of the model. [Note: shards]"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.comm import Communicator, Shard, shards_of
from allstep.errors import UsageError
from allstep.train.devices import map_tensors
from allstep.train.options import TrainOptions

State = dict[Any, Any]

_LOSSLESS = ("fp32", "bf16", "fp16", "exact")  # which leave nothing for a later step


def data_axis(model: nn.Module, comm: Communicator) -> Communicator:
    """The workers that have the same part of the model, and other samples.

    Args:
        model: the model.
        comm: all workers.

    Raises:
        UsageError: if the model is divided over a mesh of others, or one without an axis `data`.
    """
    shard = _any_shard(shards_of(model))
    if shard is None:
        return comm
    if comm is not shard.mesh.comm:
        raise UsageError(
            f"`comm` (of {comm.size} workers) is not that of {shard.mesh}, over which `task.model`"
            " is divided; pass the one that the mesh is made of."
        )
    if set(shard.mesh.shape) != {"data", shard.axis}:
        raise UsageError(
            f"`task.model` is divided over {shard.axis!r} of {shard.mesh}, whose other axis must be"
            " 'data', for the samples."
        )
    return shard.mesh["data"]


def sharing_workers(shards: Mapping[str, Shard]) -> Communicator | None:
    """Those with the parts of this worker's copy of the model; None if it has all of it."""
    shard = _any_shard(shards)
    return None if shard is None else shard.comm


def check_sharded(options: TrainOptions, reason: str) -> None:
    """Refuses options by which workers that share a copy would part, or checkpoints of a part.

    Args:
        options: of a training of a model with shards.
        reason: why it has some, for the message.

    Raises:
        UsageError: names the option, the reason, and the cure.
    """
    cures = {
        "precision": (options.precision == "float16", "take 'bfloat16'"),
        "compile": (options.compile, "leave it out"),
        "channels_last": (options.channels_last, "leave it out"),
        "compression": (
            options.compression not in _LOSSLESS,
            f"take one of {', '.join(_LOSSLESS)}",
        ),
        "staleness": (options.staleness > 0, "leave it out"),
        "sync_every": (options.sync_every is not None, "leave it out"),
        "noise_scale_every_steps": (options.noise_scale_every_steps > 0, "leave it out"),
        "shares": (options.shares == "measured", "take 'equal' or numbers"),
    }
    for name, (is_set, cure) in cures.items():
        if is_set:
            raise UsageError(
                f"`{name}` (={getattr(options, name)!r}) is for models that are whole on every"
                f" worker, and {reason}: {cure}."
            )


def gather_shards(
    model: nn.Module, optimizer: Optimizer, model_state: State, optimizer_state: State
) -> None:
    """Makes states whole on rank 0, and takes what is divided out of the others'. Collective."""
    shards = shards_of(model)
    shard = _any_shard(shards)
    if shard is None:
        return
    held = _held(model, optimizer, optimizer_state)
    local = {
        "model": {name: model_state[name] for name in shards},
        "optimizer": {name: held[name] for name in shards if name in held},
    }
    for name in shards:
        del model_state[name]
        if name in held:
            held[name].clear()
    if not shard.is_of_first_copy:
        return
    parts = shard.comm.gather_object(map_tensors(local, _on_host))
    if parts is None:
        return
    shapes = {name: p.shape for name, p in model.named_parameters() if name in shards}
    for name, shard in shards.items():
        model_state[name] = torch.cat([part["model"][name] for part in parts], shard.dim)
        if name in held:
            states = [part["optimizer"][name] for part in parts]
            held[name].update(_joined(states, shapes[name], shard.dim))


def cut_shards(
    model: nn.Module,
    optimizer: Optimizer,
    model_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What this worker loads of whole states; what doesn't fit is left as it is."""
    shards = shards_of(model)
    model_state = dict(model_state)
    optimizer_state = {
        **optimizer_state,
        "state": {key: _copied(value) for key, value in optimizer_state["state"].items()},
    }
    shapes = {name: p.shape for name, p in model.named_parameters() if name in shards}
    held = _held(model, optimizer, optimizer_state)
    for name, shard in shards.items():
        if name in model_state:
            model_state[name] = _own_part(model_state[name], shapes[name], shard)
        if name in held:
            state = held[name]
            state |= {key: _own_part(value, shapes[name], shard) for key, value in state.items()}
    return model_state, optimizer_state


def gather_exchange(shards: Mapping[str, Shard], state: State) -> State | None:
    """The state of the exchanges along all data axes, on rank 0. Collective."""
    shard = _any_shard(shards)
    if shard is None:
        return state
    if not shard.is_of_first_copy:
        return None
    parts = shard.comm.gather_object(state)
    return None if parts is None else {"parts": list(parts)}


def own_exchange(shards: Mapping[str, Shard], state: State) -> State:
    """What this worker's exchange goes on from: its own, or any where the model was cut otherwise.

    Its names are the same; bucket sizes, and the grid of exact sums, follow what they see.
    """
    parts: list[State] = state.get("parts", [state])
    comm = sharing_workers(shards)
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    return parts[rank if len(parts) == size else 0]


def _any_shard(shards: Mapping[str, Shard]) -> Shard | None:
    return next(iter(shards.values()), None)


def _held(model: nn.Module, optimizer: Optimizer, optimizer_state: Mapping[str, Any]) -> State:
    """name of a parameter -> what the optimizer's state has of it."""
    names = {id(p): name for name, p in model.named_parameters()}
    own = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    numbers = chain.from_iterable(group["params"] for group in optimizer_state["param_groups"])
    state = optimizer_state["state"]
    pairs = zip(
        own, numbers, strict=False
    )  # what doesn't fit is refused later
    return {name: state[key] for name, key in pairs if isinstance(state.get(key), dict)}


def _joined(states: list[State], shape: torch.Size, dim: int) -> State:
    """Entries of the parameter's shape are cut as it is; others are the same on all."""
    return {
        key: torch.cat([state[key] for state in states], dim) if _has_shape(value, shape) else value
        for key, value in states[0].items()
    }


def _own_part(value: Any, shape: torch.Size, shard: Shard) -> Any:
    """This worker's part, of the given shape, of a whole tensor; anything else as it is."""
    whole = list(shape)
    whole[shard.dim] *= shard.comm.size
    if not _has_shape(value, whole):
        return value
    length = shape[shard.dim]
    return value.narrow(shard.dim, shard.comm.rank * length, length).clone()


def _has_shape(value: Any, shape: list[int] | torch.Size) -> bool:
    return isinstance(value, Tensor) and list(value.shape) == list(shape)


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
