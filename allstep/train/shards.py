"""What differs in training if several workers share a copy of the model. [Note: shards]"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.comm import Communicator, Shard, parts_along_axes, shards_of
from allstep.errors import UsageError
from allstep.train.devices import map_held
from allstep.train.options import TrainOptions

State = dict[Any, Any]

_LOSSLESS = ("fp32", "bf16", "fp16", "exact")  # formats that leave nothing for a later step


def data_axis(model: nn.Module, comm: Communicator) -> Communicator:
    """The workers that have the same part of the model, and other samples.

    Parts are a pipeline's stages and the shards of layers.

    Args:
        model: the model.
        comm: all workers.

    Raises:
        UsageError: if the model is divided over a mesh of other workers, or over one that has no
            axis `data`.
    """
    parts = parts_along_axes(model)
    if not parts:
        return comm
    mesh, axes = parts[0].mesh, list(dict.fromkeys(part.axis for part in parts))
    if comm is not mesh.comm:
        raise UsageError(
            f"`comm` (of {comm.size} workers) is not that of {mesh}, over which `task.model`"
            " is divided; pass the one that the mesh is made of."
        )
    if set(mesh.shape) != {"data", *axes}:
        raise UsageError(
            f"`task.model` is divided over {' and '.join(map(repr, axes))} of {mesh}, whose other"
            " axis must be 'data', for the samples."
        )
    return mesh["data"]


def check_sharded(options: TrainOptions, reason: str) -> None:
    """Refuses options by which workers that share a copy of the model would diverge.

    Args:
        options: the training's options.
        reason: why the model has shards, for the message.

    Raises:
        UsageError: names the option, the reason, and the cure.
    """
    cures = {
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


def cut(value: Any, shape: torch.Size, shard: Shard) -> Any:
    """This worker's part, of the given shape, of a whole tensor: a view; other values unchanged."""
    whole = list(shape)
    whole[shard.dim] *= shard.comm.size
    if not (isinstance(value, Tensor) and list(value.shape) == whole):
        return value
    length = shape[shard.dim]
    return value.narrow(shard.dim, shard.comm.rank * length, length)


def cut_optimizer(
    model: nn.Module, optimizer: Optimizer, optimizer_state: Mapping[str, Any]
) -> State:
    """This worker's part of a whole optimizer's state; unfit tensors stay as they are."""
    shard_of = {id(model.get_parameter(name)): shard for name, shard in shards_of(model).items()}

    def part(value: Any, p: Tensor) -> Any:
        shard = shard_of.get(id(p))
        return value if shard is None else cut(value, p.shape, shard)

    return map_held(optimizer, optimizer_state, part)
