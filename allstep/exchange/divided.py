"""The parameters that only this worker has, as its part of the model changes."""

from collections.abc import Callable

from torch import Tensor, nn

from allstep.comm import AlongAxis, Communicator, divided_modules, shards_of, stages_of
from allstep.errors import UsageError
from allstep.exchange.hooks import AccumulationHook
from allstep.exchange.parameters import Snapshot
from allstep.exchange.policy import ExchangePolicy, Synchronous


class DividedParameters:
    """Those of a model's divided modules; no other worker is asked. [Note: divided parameters]

    Args:
        model: the attached model.
        scaled: what is added to `p.grad` for a gradient, as `AccumulationHook` says.

    Attributes:
        by_name: name -> parameter, frozen or not.
        has_modules: whether there are such modules, with parameters or without: the same on all
            workers.
    """

    def __init__(self, model: nn.Module, scaled: Callable[[Tensor | None], Tensor | None]) -> None:
        self._model = model
        self._scaled = scaled
        self._hooks: list[AccumulationHook] = []
        self.refresh()

    def follow(self) -> None:
        """Takes the known modules as they are now; cheap if nothing has changed."""
        if self._snapshot.has_changed():
            self.refresh()

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
        trained = (p for p in self.by_name.values() if p.requires_grad)
        self._hooks.extend(AccumulationHook(p, self._scaled) for p in trained)


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
        if not isinstance(policy, Synchronous) or policy.wire_format.name == "exact":
            how = "compression='exact'" if isinstance(policy, Synchronous) else policy
            raise UsageError(
                f"`policy` (={how}) is for models that are whole on every worker, and"
                f" `model.{name}` is divided over them; use `Synchronous()` with another"
                " compression."
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
