"""Converts states of a model that is divided over workers to and from those of a whole model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.comm import (
    Communicator,
    DividedModules,
    Shard,
    StageModules,
    divided_modules,
    parts_along_axes,
    shards_of,
    stages_of,
)
from allstep.errors import UsageError
from allstep.nn import DividedTensor, Window
from allstep.torch_classes import bounds_of, is_dtensor, local_part
from allstep.train.devices import map_held, map_tensors
from allstep.train.dtensors import cut_dtensor, cut_dtensors
from allstep.train.fitting import check_groups, check_model_state
from allstep.train.shards import cut, cut_optimizer

State = dict[Any, Any]
_Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Kind:
    """Modules that are placed on workers in the same way: experts, or stages.

    Attributes:
        names: prefix of their parameters' names -> the names of all the modules, in order.
        comm: the workers over which the modules are divided.
    """

    names: Mapping[str, tuple[str, ...]]
    comm: Communicator

    def prefix_of(self, name: str) -> str:
        """The prefix of the modules that hold a parameter; empty if none does."""
        return next((prefix for prefix in self.names if name.startswith(prefix)), "")

    def place_of(self, name: str) -> int:
        """Index among the kind's modules of the one that holds a parameter; 0 if none does."""
        prefix = self.prefix_of(name)
        module = name.removeprefix(prefix).partition(".")[0]
        return self.names[prefix].index(module) if prefix else 0


@dataclass(frozen=True)
class _Owned:
    """The parts of a model that differ between workers: modules, and shards.

    Attributes:
        kinds: kinds of modules; experts come before the stages that they are in.
        workers: all workers of the model.
    """

    kinds: Sequence[_Kind]
    workers: Communicator

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of all kinds."""
        return tuple(prefix for kind in self.kinds for prefix in kind.names)


def _owned_parts(model: nn.Module) -> _Owned | None:
    experts, stages = divided_modules(model), stages_of(model)
    kinds = [_kind(modules) for modules in (experts, stages) if modules]
    all_workers = [part.mesh.comm for part in parts_along_axes(model)]
    all_workers += [modules.workers for modules in experts.values()]
    return _Owned(kinds, all_workers[0]) if all_workers else None


def _kind(modules: Mapping[str, DividedModules] | Mapping[str, StageModules]) -> _Kind:
    names = {f"{name}." if name else "": module.names for name, module in modules.items()}
    comm, *_ = (module.comm for module in modules.values())
    return _Kind(names, comm)


def whole_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> State:
    """Tensors of a divided model as a checkpoint stores them. All workers call it.

    [Note: whole checkpoints] A checkpoint has every expert, every stage of a pipeline and every
    part of a chain under its name in the whole model, whole parameters in place of shards, and the
    optimizer's state in the order of the whole model's parameters, so that any number of workers
    can continue from it.
    [Note: divided checkpoints]

    Args:
        model: the model.
        tensors: its state dict, or its gradients by name.

    Returns:
        The same for the whole model, as divided tensors; `tensors` itself if nothing is divided.
    """
    owned = _owned_parts(model)
    return dict(tensors) if owned is None else _of_all(tensors, owned, model)


def local_model(model: nn.Module, state: Mapping[str, Any]) -> State:
    """The part of a `whole_tensors` state dict that this worker needs. All workers call it.

    Raises:
        CheckpointError: on every worker, if it belongs to another model; names the whole tensors.
    """
    check_model_state(whole_tensors(model, model.state_dict()), state)
    return local_tensors(model, state)


def local_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> State:
    """This worker's parts of `whole_tensors`' tensors, as views; unfit tensors stay as they are."""
    shards, owned = shards_of(model), _owned_parts(model)
    if owned is not None:
        own, prefixes = model.state_dict(), owned.prefixes
        tensors = {n: x for n, x in tensors.items() if n in own or not n.startswith(prefixes)}
    tensors = {
        name: cut(x, model.get_parameter(name).shape, shards[name]) if name in shards else x
        for name, x in tensors.items()
    }
    return cut_dtensors(model, tensors)


def whole_optimizer(model: nn.Module, optimizer: Optimizer) -> State:
    """The optimizer's state dict for the whole model, as `whole_tensors`. All workers call it.

    Raises:
        UsageError: if the optimizer has parameters of other workers' parts, but none of rank 0's.
    """
    optimizer_state = optimizer.state_dict()
    owned = _owned_parts(model)
    if owned is None:
        return optimizer_state
    own_names = list(chain.from_iterable(_names(model, optimizer)))
    by_name: State = {
        own_names[key] if isinstance(key, int) else key: state
        for key, state in optimizer_state["state"].items()
    }
    by_name = _of_all(by_name, owned, model)
    groups = _whole_names(model, optimizer, owned)
    numbers = {name: number for number, name in enumerate(chain.from_iterable(groups))}
    optimizer_state["state"] = {numbers.get(name, name): s for name, s in by_name.items()}
    for group, names in zip(optimizer_state["param_groups"], groups, strict=True):
        group["params"] = [numbers[name] for name in names]
        if "param_names" in group:
            group["param_names"] = names
    return optimizer_state


def local_optimizer(
    model: nn.Module, optimizer: Optimizer, optimizer_state: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The part of a `whole_optimizer` state dict that this worker needs. Collective.

    Raises:
        CheckpointError: on every worker, if it belongs to an optimizer with other groups.
    """
    owned = _owned_parts(model)
    if owned is None:
        return map_held(optimizer, optimizer_state, cut_dtensor)
    groups = _whole_names(model, optimizer, owned)
    saved_groups = optimizer_state["param_groups"]
    check_groups([len(names) for names in groups], optimizer_state)
    number_of = {
        name: number
        for names, group in zip(groups, saved_groups, strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }
    others = set(number_of.values())
    param_groups = []
    for names, group in zip(_names(model, optimizer), saved_groups, strict=True):
        group = {**group, "params": [number_of[name] for name in names]}
        if "param_names" in group:
            group["param_names"] = names
        others -= set(group["params"])
        param_groups.append(group)
    state = {key: value for key, value in optimizer_state["state"].items() if key not in others}
    own_state = {**optimizer_state, "state": state, "param_groups": param_groups}
    return map_held(optimizer, cut_optimizer(model, optimizer, own_state), cut_dtensor)


def _names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters in each of the optimizer's groups on this worker."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _whole_names(model: nn.Module, optimizer: Optimizer, owned: _Owned) -> list[list[str]]:
    """Names of the parameters in each group of an optimizer over the whole model. Collective.

    All workers' parts of a divided module stand where rank 0 has its own part, in rank order.
    """
    names = _names(model, optimizer)
    for kind in owned.kinds:
        by_rank: list[list[list[str]]] = kind.comm.all_gather_object(names)
        names = [_joined(of_group, kind) for of_group in zip(*by_rank, strict=True)]
    return names


def _joined(by_rank: Sequence[list[str]], kind: _Kind) -> list[str]:
    """The names of a group's parameters on all workers that hold modules of a kind."""
    names: list[str] = []
    for prefix, run in groupby(by_rank[0], kind.prefix_of):
        parts = chain.from_iterable(by_rank) if prefix else run
        found = (name for name in parts if kind.prefix_of(name) == prefix)
        names += sorted(found, key=kind.place_of)
    if len(names) != len(set(chain.from_iterable(by_rank))):
        raise UsageError(
            "The optimizer trains other parts of a divided module on rank 0 than on others:"
            " a checkpoint needs a module of each group of parameters on rank 0."
        )
    return names


def _of_all(state: Mapping[Any, Any], owned: _Owned, model: nn.Module) -> State:
    """The state with the entries of all workers' divided modules and shards. Collective.

    It is the same on every worker. One-element tensors are copied to all; the others stay on the
    workers that own them.
    """
    workers = owned.workers
    shards = {n: s for n, s in shards_of(model).items() if n in state}
    own = {
        k: v
        for k, v in state.items()
        if k in shards or (isinstance(k, str) and k.startswith(owned.prefixes))
    }
    cuts = {
        n: _cut_of(p, shards.get(n))
        for n, p in model.named_parameters(remove_duplicate=False)
        if n in shards or (n in own and is_dtensor(p))
    }
    by_rank = workers.all_gather_object((map_tensors(own, _described), cuts))
    whole = {key: value for key, value in state.items() if key not in own}
    for name in dict.fromkeys(chain.from_iterable(entries for entries, _ in by_rank)):
        told = next(entries[name] for entries, _ in by_rank if name in entries)

        def of_all(x: Tensor, name: str = name) -> Any:
            if x.dim() == 0:
                return x.detach().cpu()
            shape = whole_shape = tuple(x.shape if name in own else x.shape[1:])
            windows: list[Window | None] = [None] * workers.size
            for rank, (entries, cuts) in enumerate(by_rank):
                part_shape, *place = cuts.get(name, (None,))
                if name in entries and part_shape == shape:
                    whole_shape, start, stop = place
                    windows[rank] = Window(start, stop)
                elif name in entries:
                    windows[rank] = Window.whole(shape)
            local = None if windows[workers.rank] is None else local_part(x)
            return DividedTensor(local, whole_shape, x.dtype, windows, workers)

        whole[name] = map_tensors(own.get(name, told), of_all)
    return whole


def _cut_of(p: nn.Parameter, shard: Shard | None) -> tuple[_Shape, _Shape, _Shape, _Shape]:
    """A worker's shape of a parameter, the whole one's, and start and stop of its elements there.

    Args:
        p: the parameter, which FSDP2 may have sharded.
        shard: which part of the whole one it is, if a layer is divided.
    """
    whole, (start, stop) = list(p.shape), map(list, bounds_of(p))
    if shard is not None:
        before = shard.comm.rank * p.shape[shard.dim]
        start[shard.dim] += before
        stop[shard.dim] += before
        whole[shard.dim] *= shard.comm.size
    return tuple(p.shape), tuple(whole), tuple(start), tuple(stop)


def _described(tensor: Tensor) -> Tensor:
    """Shape and dtype, as an empty tensor with one more dimension, which can be sent."""
    if tensor.dim() == 0:
        return tensor.detach().cpu()
    return torch.empty((0, *tensor.shape), dtype=tensor.dtype)
