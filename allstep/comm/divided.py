"""Parts of a model that only some workers hold, as the exchange of gradients sees them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from allstep.comm.communicator import Communicator
from allstep.comm.mesh import Mesh
from allstep.torch_classes import loaded_class

if TYPE_CHECKING:  # this import takes seconds
    from torch.distributed.fsdp import FSDPModule


CallGradientHook = Callable[[str, nn.Parameter, int, Tensor], Tensor | None]


class DividedModules(nn.ModuleDict):
    """Modules of which each worker holds some, under names that are the same on all workers.

    [Note: divided parameters] `attach` leaves them to the worker that holds them: it sends neither
    their values nor their gradients. The layer around them must send data through the workers, so
    that their gradient is that of the sum of all workers' losses,

        grad = scale * sum_r grad of loss_r

    with the scale of every other gradient: 1/size for a mean, 1 where losses are weighted already.
    Where there are several copies of the modules, data go through the workers of one copy, and
    `attach` adds up the gradients of all copies. [Note: copies of divided modules]

    Args:
        comm: the workers over which one copy of the modules is divided.
        names: names of the modules of all workers, in the same order on all of them.
        workers: the workers that the model is attached to, if other workers than those of `comm`
            hold copies.
        copies: the workers among them that hold the same modules as this one.
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        *,
        workers: Communicator | None = None,
        copies: Communicator | None = None,
    ) -> None:
        super().__init__()
        self._comm, self._workers, self._copies = comm, workers or comm, copies
        self.names = tuple(names)
        self._call_gradient_hooks: OrderedDict[int, CallGradientHook] = OrderedDict()

    @property
    def comm(self) -> Communicator:
        """The workers over which one copy of the modules is divided."""
        return self._comm

    @property
    def workers(self) -> Communicator:
        """The workers that the model is attached to."""
        return self._workers

    @property
    def copies(self) -> Communicator | None:
        """The workers among them that hold the same modules; None if only this one does."""
        return self._copies

    def call(self, name: str, x: Tensor, rank: int) -> Any:
        """Calls a module with one worker's data; returns the module's output.

        A backward pass adds up the gradients from all workers' data before a parameter gets them.
        Where hooks are registered for the separate gradients, a call uses aliases of the
        parameters.

        Args:
            name: name of the module.
            x: the module's input.
            rank: rank of the worker whose data `x` is.
        """
        module, hooks = self[name], list(self._call_gradient_hooks.values())
        if not hooks or not torch.is_grad_enabled():
            return module(x)
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        aliases = {n: p.view_as(p) for n, p in trained.items()}
        for n, p in trained.items():
            for hook in hooks:
                aliases[n].register_hook(partial(hook, f"{name}.{n}", p, rank))  # type: ignore[no-untyped-call]
        return torch.func.functional_call(module, aliases, (x,))

    def register_call_gradient_hook(self, hook: CallGradientHook) -> RemovableHandle:
        """Registers a function that is called with each parameter's gradient from each `call`.

        Args:
            hook: (the parameter's name in here, the parameter, the call's rank, the gradient) -> a
                replacement for the gradient, or None.
        """
        handle = RemovableHandle(self._call_gradient_hooks)
        self._call_gradient_hooks[handle.id] = hook
        return handle


def divided_modules(model: nn.Module) -> dict[str, DividedModules]:
    """The model's modules that are divided over several workers, by name."""
    return _of_several_workers(model, DividedModules)


def divided_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of divided parameters and buffers, for `str.startswith`.

    >>> divided_prefixes(nn.Linear(2, 1))
    ()
    """
    return prefixes_of(divided_modules(model))


def prefixes_of(names: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of the names of modules' own parts, for `str.startswith`.

    >>> prefixes_of(["layers.0", ""])
    ('layers.0.', '')
    """
    return tuple(f"{name}." if name else "" for name in names)


class AlongAxis:
    """Something of which each worker along an axis of a mesh holds a different part.

    Attributes:
        mesh: the workers.
        axis: name of the axis.
    """

    mesh: Mesh[Communicator]
    axis: str

    @property
    def comm(self) -> Communicator:
        """The workers that hold the parts of one copy."""
        return self.mesh[self.axis]


@dataclass(frozen=True)
class Shard(AlongAxis):
    """How a parameter is sharded over workers. [Note: shards]

    Args:
        mesh: the workers.
        axis: the mesh's axis along which the parameter is sharded, in equal parts in rank order.
        dim: the parameter's dimension that is sharded.
    """

    mesh: Mesh[Communicator]
    axis: str
    dim: int


class ShardHook:
    """A forward pre-hook of a module that has sharded parameters.

    Attributes:
        shards: name of the module's parameter -> how it is sharded.
        local: name -> the module's own parameter, while a call uses another tensor in its place.
    """

    shards: Mapping[str, Shard]
    local: Mapping[str, nn.Parameter]


class StageModules(AlongAxis, nn.ModuleDict):
    """This worker's modules, by name; the other workers along an axis of a mesh hold others.

    Args:
        mesh: the workers.
        axis: the mesh's axis along which the modules are distributed.
        names: names of the modules of all workers, in the same order on all of them.
        can_be_sharded: whether FSDP2 may shard each module, since all copies of the model call it
            equally often.
    """

    def __init__(
        self,
        mesh: Mesh[Communicator],
        axis: str,
        names: Sequence[str],
        *,
        can_be_sharded: bool = False,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.axis = axis
        self.names = tuple(names)
        self.can_be_sharded = can_be_sharded


class PartOfArray(nn.Module):
    """A module whose own parameters are divided over workers, each of which holds some window.

    Args:
        comm: the workers that hold the parts.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm

    @property
    def comm(self) -> Communicator:
        """The workers that hold the parts."""
        return self._comm


def arrays_of(model: nn.Module) -> dict[str, PartOfArray]:
    """The model's modules whose parameters are parts of several workers' arrays, by name."""
    return _of_several_workers(model, PartOfArray)


def workers_of_parts(model: nn.Module) -> dict[str, Communicator]:
    """The workers that hold the parts of each parameter that is a shard or window, by its name."""
    found = {name: shard.comm for name, shard in shards_of(model).items()}
    for prefix, module in arrays_of(model).items():
        for name, _ in module.named_parameters(prefix, recurse=False):
            found[name] = module.comm
    return found


def stages_of(model: nn.Module) -> dict[str, StageModules]:
    """The model's `StageModules` along an axis of several workers, by name."""
    return _of_several_workers(model, StageModules)


_Parts = TypeVar("_Parts", DividedModules, StageModules, PartOfArray)


def _of_several_workers(model: nn.Module, kind: type[_Parts]) -> dict[str, _Parts]:
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, kind) and m.comm.size > 1}


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """The model's sharded parameters: name -> how the parameter is sharded."""
    return {
        f"{prefix}.{name}" if prefix else name: shard
        for prefix, module in model.named_modules()
        for hook in _shard_hooks(module)
        for name, shard in hook.shards.items()
    }


def local_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own parameters by name, even during a call with others in place of shards."""
    found = {name: p for name, p in module._parameters.items() if p is not None}
    for hook in _shard_hooks(module):
        found.update(hook.local)
    return found


def _shard_hooks(module: nn.Module) -> list[ShardHook]:
    hooks: Iterable[object] = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, ShardHook)]


def fsdp_modules(model: nn.Module) -> "dict[str, FSDPModule]":
    """The modules on which FSDP2's `fully_shard` was called, by name.

    >>> fsdp_modules(nn.Linear(2, 1))
    {}
    """
    kind = loaded_class("torch.distributed.fsdp", "FSDPModule")
    return {name: m for name, m in model.named_modules() if isinstance(m, kind)}


def parts_along_axes(model: nn.Module) -> list[AlongAxis]:
    """Everything that `stages_of` and `shards_of` find."""
    return [*stages_of(model).values(), *shards_of(model).values()]
