"""Parts of a model that only some workers have, as seen by what exchanges gradients."""

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

if TYPE_CHECKING:  # its import takes seconds
    from torch.distributed.fsdp import FSDPModule


CallGradientHook = Callable[[str, nn.Parameter, int, Tensor], Tensor | None]


class DividedModules(nn.ModuleDict):
    """Modules that are divided over workers, under names that are the same whoever has them.

    [Note: divided parameters] `attach` leaves them to the worker that has them: it neither sends
    their values nor their gradients. The layer around them must send data through the workers, so
    that their gradient is that of the sum of all workers' losses,

        grad = scale * sum_r grad of loss_r

    with the scale of every other gradient: 1/size for a mean, 1 where losses are weighed already.
    Where there are copies of them, data go through the workers of one, and `attach` adds up the
    gradients of all. [Note: copies of divided modules]

    Args:
        comm: the workers that they are divided over.
        names: of the modules of all workers, in an order that does not depend on who has them.
        workers: those that the model is attached to, if there are copies on others than `comm`'s.
        copies: those of them that have the same modules.
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
        """The workers that they are divided over."""
        return self._comm

    @property
    def workers(self) -> Communicator:
        """Those that the model is attached to."""
        return self._workers

    @property
    def copies(self) -> Communicator | None:
        """Those of them that have the same modules; None if only this one has."""
        return self._copies

    def call(self, name: str, x: Tensor, rank: int) -> Any:
        """What a module makes of a worker's data.

        A backward pass adds up the gradients of all workers' data before a parameter gets them.
        Where there are hooks for these gradients, a call has aliases of the parameters.

        Args:
            name: of the module.
            x: what it is called with.
            rank: the worker whose data it is.
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
        """Calls a function with each gradient of a parameter in one `call`.

        Args:
            hook: (the parameter's name here, the parameter, the call's rank, its gradient) -> what
                takes the gradient's place, or None.
        """
        handle = RemovableHandle(self._call_gradient_hooks)
        self._call_gradient_hooks[handle.id] = hook
        return handle


def divided_modules(model: nn.Module) -> dict[str, DividedModules]:
    """name -> modules of the model that are divided over several workers."""
    return _of_several_workers(model, DividedModules)


def divided_prefixes(model: nn.Module) -> tuple[str, ...]:
    """What the names of divided parameters and buffers begin with, for `str.startswith`.

    >>> divided_prefixes(nn.Linear(2, 1))
    ()
    """
    return prefixes_of(divided_modules(model))


def prefixes_of(names: Iterable[str]) -> tuple[str, ...]:
    """What the names of modules' own parts begin with, for `str.startswith`.

    >>> prefixes_of(["layers.0", ""])
    ('layers.0.', '')
    """
    return tuple(f"{name}." if name else "" for name in names)


class AlongAxis:
    """What each worker along an axis of a mesh has another part of.

    Attributes:
        mesh: the workers.
        axis: that of the mesh.
    """

    mesh: Mesh[Communicator]
    axis: str

    @property
    def comm(self) -> Communicator:
        """The workers that have the parts of the same copy."""
        return self.mesh[self.axis]


@dataclass(frozen=True)
class Shard(AlongAxis):
    """Which part of a parameter this worker has. [Note: shards]

    Args:
        mesh: the workers.
        axis: that of the mesh along which the parameter is cut, in equal parts by place.
        dim: of the parameter, that is cut.
    """

    mesh: Mesh[Communicator]
    axis: str
    dim: int


class ShardHook:
    """A forward pre-hook of a module some of whose parameters are shards.

    Attributes:
        shards: name of the module's parameter -> shard.
        local: name -> parameter of the module that another stands in the place of, in a call.
    """

    shards: Mapping[str, Shard]
    local: Mapping[str, nn.Parameter]


class StageModules(AlongAxis, nn.ModuleDict):
    """Modules that this worker has, by name; others along an axis of a mesh have others.

    Args:
        mesh: the workers.
        axis: that of the mesh along which the modules lie.
        names: of the modules of all workers, in an order that does not depend on who has them.
        can_be_sharded: whether FSDP2 may shard each of them, as what calls them has all copies of
            the model call them equally often.
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
    """A module of whose own parameters each worker has another part, in windows of any shape.

    Args:
        comm: the workers that have the parts.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm

    @property
    def comm(self) -> Communicator:
        """The workers that have the parts."""
        return self._comm


def arrays_of(model: nn.Module) -> dict[str, PartOfArray]:
    """name -> module, of those whose parameters are parts of several workers' arrays."""
    return _of_several_workers(model, PartOfArray)


def workers_of_parts(model: nn.Module) -> dict[str, Communicator]:
    """name -> workers that have the parts of a parameter, be they shards or windows."""
    found = {name: shard.comm for name, shard in shards_of(model).items()}
    for prefix, module in arrays_of(model).items():
        for name, _ in module.named_parameters(prefix, recurse=False):
            found[name] = module.comm
    return found


def stages_of(model: nn.Module) -> dict[str, StageModules]:
    """name -> modules of the model that lie along an axis of several workers."""
    return _of_several_workers(model, StageModules)


_Parts = TypeVar("_Parts", DividedModules, StageModules, PartOfArray)


def _of_several_workers(model: nn.Module, kind: type[_Parts]) -> dict[str, _Parts]:
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, kind) and m.comm.size > 1}


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """name -> shard, of the model's parameters of which other workers have other parts."""
    return {
        f"{prefix}.{name}" if prefix else name: shard
        for prefix, module in model.named_modules()
        for hook in _shard_hooks(module)
        for name, shard in hook.shards.items()
    }


def local_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """name -> parameter of the module itself, also in a call that has others in place of shards."""
    found = {name: p for name, p in module._parameters.items() if p is not None}
    for hook in _shard_hooks(module):
        found.update(hook.local)
    return found


def _shard_hooks(module: nn.Module) -> list[ShardHook]:
    hooks: Iterable[object] = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, ShardHook)]


def fsdp_modules(model: nn.Module) -> "dict[str, FSDPModule]":
    """name -> module, of those that FSDP2's `fully_shard` was called on.

    >>> fsdp_modules(nn.Linear(2, 1))
    {}
    """
    kind = loaded_class("torch.distributed.fsdp", "FSDPModule")
    return {name: m for name, m in model.named_modules() if isinstance(m, kind)}


def parts_along_axes(model: nn.Module) -> list[AlongAxis]:
    """All that `stages_of` and `shards_of` find."""
    return [*stages_of(model).values(), *shards_of(model).values()]
