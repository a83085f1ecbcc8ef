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
    held, numbers = optimizer_state["state"], _numbers(model, optimizer, optimizer_state)
    keys = {name: numbers[name] for name in shards if numbers.get(name) in held}
    own_model = {name: model_state.pop(name) for name in shards}
    own_held = {name: held.pop(key) for name, key in keys.items()}
    if not shard.is_of_first_copy:
        return
    parts = shard.comm.gather_object(map_tensors((own_model, own_held), _on_host))
    if parts is None:
        return
    for name, shard in shards.items():
        shape = own_model[name].shape
        model_state[name] = torch.cat([of_model[name] for of_model, _ in parts], shard.dim)
        if name in keys:
            states = [of_optimizer[name] for _, of_optimizer in parts]
            held[keys[name]] = _joined(states, shape, shard.dim)


def cut_shards(
    model: nn.Module,
    optimizer: Optimizer,
    model_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What this worker loads of whole states; what doesn't fit is left as it is."""
    shards = shards_of(model)
    numbers = _numbers(model, optimizer, optimizer_state)
    model_state, held = dict(model_state), dict(optimizer_state["state"])
    for name, shard in shards.items():
        shape = model.get_parameter(name).shape
        if name in model_state:
            model_state[name] = _own_part(model_state[name], shape, shard)
        key = numbers.get(name)
        if isinstance(held.get(key), dict):
            held[key] = {k: _own_part(value, shape, shard) for k, value in held[key].items()}
    return model_state, {**optimizer_state, "state": held}


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


def _numbers(
    model: nn.Module, optimizer: Optimizer, optimizer_state: Mapping[str, Any]
) -> dict[str, int]:
    """name of a parameter -> its number in the optimizer's state."""
    names = {id(p): name for name, p in model.named_parameters()}
    own = (names[id(p)] for group in optimizer.param_groups for p in group["params"])
    saved = chain.from_iterable(group["params"] for group in optimizer_state["param_groups"])
    return dict(zip(own, saved, strict=False))  # what doesn't fit is refused later


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


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
