"""The parameters that only this worker has, as its part of the model changes."""

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn

from allstep.comm import (
    AlongAxis,
    Communicator,
    DividedModules,
    divided_modules,
    shards_of,
    stages_of,
)
from allstep.comm.divided import CallGradientHook
from allstep.errors import UsageError
from allstep.exchange.hooks import AccumulationHook, ModuleHook, Removable, WeakHook
from allstep.exchange.parameters import Snapshot
from allstep.exchange.policy import ExchangePolicy, Synchronous


class DividedParameters:
    """Those of a model's divided modules; no other worker is asked. [Note: divided parameters]

    Args:
        model: the attached model.
        scaled: what is added to `p.grad` for a gradient, as `AccumulationHook` says, by the
            parameter's name.
        rounded: what takes the place of the gradient of one worker's data before, as
            `DividedModules.register_call_gradient_hook` says.

    Attributes:
        by_name: name -> parameter, frozen or not.
        has_modules: whether there are such modules, with parameters or without: the same on all
            workers.
    """

    def __init__(
        self,
        model: nn.Module,
        scaled: Callable[[str, Tensor | None], Tensor | None],
        rounded: CallGradientHook | None = None,
    ) -> None:
        self._model = model
        self._scaled = scaled
        self._rounded = rounded
        self._hooks: list[Removable] = []
        self.refresh()

    def follow(self) -> None:
        """Takes the known modules as they are now; cheap if nothing has changed."""
        if self._snapshot.has_changed():
            self.refresh()

    def may_have(self, names: Iterable[str]) -> bool:
        """Whether parameters of these names are of such modules, on any number of workers."""
        modules = self._model.named_modules()
        found = (name for name, module in modules if isinstance(module, DividedModules))
        prefixes = tuple(f"{name}." if name else "" for name in found)
        return all(name.startswith(prefixes) for name in names)

    def detach(self) -> None:
        """Removes all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def refresh(self) -> None:
        """Takes the model as it is now, with modules that have joined it."""
        self.detach()
        divided = divided_modules(self._model)
        self.has_modules = bool(divided)
        self.by_name = {
            name: p
            for prefix, modules in divided.items()
            for name, p in modules.named_parameters(prefix)
        }
        self._snapshot = Snapshot(m for modules in divided.values() for m in modules.modules())
        for name, p in self.by_name.items():
            if p.requires_grad:
                self._hooks.append(AccumulationHook(p, partial(self._scaled, name)))
        if self._rounded is not None:
            for prefix, modules in divided.items():
                hook = WeakHook(self, type(self)._round, f"{prefix}." if prefix else "")
                register = modules.register_call_gradient_hook
                self._hooks.append(ModuleHook(modules, register, hook))

    def _round(
        self, prefix: str, name: str, p: nn.Parameter, rank: int, gradient: Tensor
    ) -> Tensor | None:
        return None if self._rounded is None else self._rounded(prefix + name, p, rank, gradient)


def check_divided(model: nn.Module, comm: Communicator, policy: ExchangePolicy) -> None:
    """Checks that what is divided of a model is for these workers and this policy.

    Shards are exchanged by the workers that have the same ones. Divided modules' gradients are of
    this step, and of exactly the workers that they are divided over.

    Raises:
        UsageError: names the module or parameter and the cure.
    """
    _check_axes(model, comm)
    for name, modules in divided_modules(model).items():
        if modules.comm is not comm:
            raise UsageError(
                f"`model.{name}` is divided over the {modules.comm.size} workers of another"
                f" communicator than `comm` (of {comm.size}): make the model with the one that it"
                " is attached to."
            )
        if not isinstance(policy, Synchronous):
            raise UsageError(
                f"`policy` (={policy}) is for models that are whole on every worker, and"
                f" `model.{name}` is divided over them; use `Synchronous()`."
            )
        _refuse_shared(model, name, modules)


def _check_axes(model: nn.Module, comm: Communicator) -> None:
    """Workers along these axes have other parts of the model; those along others the same."""
    parts: dict[str, tuple[AlongAxis, str, str]] = {}
    for name, shard in shards_of(model).items():
        parts[shard.axis] = shard, f"a shard of `{name}`", "shards"
    for name, stages in stages_of(model).items():
        parts[stages.axis] = stages, f"some of `model.{name}`", "stages"
    for axis, (part, what, plural) in parts.items():
        others = {name: part.mesh[name] for name in part.mesh.shape if name not in parts}
        if not any(comm is other for other in others.values()):
            raise UsageError(
                f"`model` has {what} on each of the workers along {axis!r}, and"
                f" `comm` (of {comm.size}) is no other axis of their mesh: attach it to mesh["
                f"{next(iter(others), 'data')!r}], whose workers have the same {plural}."
            )


def _refuse_shared(model: nn.Module, divided_name: str, divided: nn.Module) -> None:
    """One copy of a parameter would be exchanged, or none."""
    inside, own = set(divided.modules()), set(divided.parameters())
    others = ((prefix, module) for prefix, module in model.named_modules() if module not in inside)
    for prefix, module in others:
        for name, p in module.named_parameters(prefix, recurse=False):
            if p in own:
                raise UsageError(
                    f"Parameter `{name}` is also one of `model.{divided_name}`, which is divided"
                    " over the workers: give each a parameter of its own."
                )
