"""The parameters of modules that are divided over workers, as the model changes."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from allstep.comm import (
    AlongAxis,
    Communicator,
    DividedModules,
    arrays_of,
    divided_modules,
    prefixes_of,
    shards_of,
    stages_of,
)
from allstep.comm.divided import CallGradientHook
from allstep.comm.reproducible import ReproducibleSum, sums_over_workers
from allstep.errors import UsageError
from allstep.exchange.hooks import AccumulationHook, ModuleHook, Removable, WeakHook
from allstep.exchange.parameters import Snapshot, sparse_gradient_message
from allstep.exchange.policy import ExchangePolicy, Synchronous


class DividedParameters:
    """The parameters of a model's divided modules on this worker. [Note: divided parameters]

    Args:
        model: the attached model.
        scaled: `(name, gradient) -> gradient` to add to `p.grad`, as in `AccumulationHook`.
        rounded: replaces the gradient of one worker's data before that, as in
            `DividedModules.register_call_gradient_hook`.

    Attributes:
        by_name: name -> parameter, frozen or not.
        copies: the workers that have the same modules; None if no others have.
        has_modules: whether the model has divided modules, with parameters on this worker or
            without; the same on all workers.
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
        self._touched: set[str] = set()  # parameters with a gradient that copies haven't seen
        self.refresh()

    def follow(self) -> None:
        """Adapts to changes of the known modules; cheap if nothing has changed."""
        if self._snapshot.has_changed():
            self.refresh()

    def may_have(self, names: Iterable[str]) -> bool:
        """Whether parameters of these names may be in divided modules, on any number of workers."""
        modules = self._model.named_modules()
        found = (name for name, module in modules if isinstance(module, DividedModules))
        prefixes = prefixes_of(found)
        return all(name.startswith(prefixes) for name in names)

    def detach(self) -> None:
        """Removes all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def refresh(self) -> None:
        """Adapts to the present model, including modules that have joined it."""
        self.detach()
        divided = divided_modules(self._model)
        self.has_modules = bool(divided)
        self.copies = next((modules.copies for modules in divided.values()), None)
        self.by_name = {
            name: p
            for prefix, modules in divided.items()
            for name, p in modules.named_parameters(prefix)
        }
        self._snapshot = Snapshot(m for modules in divided.values() for m in modules.modules())
        for name, p in self.by_name.items():
            if p.requires_grad:
                self._hooks.append(AccumulationHook(p, partial(self._scaled, name)))
                if self.copies is not None:
                    hook = WeakHook(self, type(self)._note, name)
                    self._hooks.append(AccumulationHook(p, hook))
        if self._rounded is not None:
            for prefix, modules in self._model.named_modules():
                if not isinstance(modules, DividedModules):  # one worker's are rounded as others
                    continue
                hook = WeakHook(self, type(self)._round, f"{prefix}." if prefix else "")
                register = modules.register_call_gradient_hook
                self._hooks.append(ModuleHook(modules, register, hook))

    def _round(
        self, prefix: str, name: str, p: nn.Parameter, rank: int, gradient: Tensor
    ) -> Tensor | None:
        return None if self._rounded is None else self._rounded(prefix + name, p, rank, gradient)

    def _note(self, name: str, gradient: Tensor | None) -> None:
        """Called before a gradient is added to `p.grad`."""
        p, copies = self.by_name[name], self.copies
        if gradient is not None and gradient.layout != torch.strided:
            raise UsageError(sparse_gradient_message(name))
        if name not in self._touched and copies is not None:
            self._touched.add(name)
            if p.grad is not None:
                _keep_part(p, copies.size)

    @torch.no_grad()
    def broadcast(self, *, buffers_only: bool = False) -> None:
        """Copies the first copy's values to all. Collective."""
        modules = divided_modules(self._model).values()
        tensors = [buffer for module in modules for buffer in module.buffers()]
        if not buffers_only:
            tensors += self.by_name.values()
        if self.copies is not None and tensors:
            self.copies.broadcast(tuple(x.detach() for x in tensors))

    @torch.no_grad()
    def sum_copies(self, off_grid: dict[str, ReproducibleSum]) -> None:
        """Replaces `p.grad` by its sum over the copies. Collective among them.

        [Note: copies of divided modules] A copy sees the data of the workers it is divided over. At
        the end of an exchange one message says for which parameters any copy has a new gradient,
        and a second one sums these gradients; other parameters keep `p.grad`. With exact sums a
        third one sums what did not fit the grid, if anything did. What `p.grad` held before is
        divided by the number of copies, so that it counts once.

        Args:
            off_grid: name -> this worker's gradients that did not fit the grid; replaced by the sum
                over all copies.

        Raises:
            UsageError: on all copies, if some have frozen a parameter and others not.
        """
        copies, parameters = self.copies, self.by_name
        if copies is None or not parameters:
            return
        new = {n for n, p in parameters.items() if n in self._touched and p.grad is not None}
        self._touched.clear()
        flags = torch.tensor(
            [[n in new, n in off_grid, p.requires_grad] for n, p in parameters.items()]
        )
        counts = copies.all_reduce(flags.to(copies.device, torch.int32)).tolist()
        by_name = dict(zip(parameters, counts, strict=True))
        for name, (_, _, num_trained) in by_name.items():
            if num_trained not in (0, copies.size):
                raise UsageError(
                    f"`{name}` is frozen on some of the {copies.size} workers that have copies of"
                    " it, and trained on others: call `requires_grad_` on all of them."
                )
        summed = {name: parameters[name] for name, (num_new, *_) in by_name.items() if num_new}
        for name in summed.keys() - new:
            _keep_part(summed[name], copies.size)
        gradients = tuple(p.grad.detach() for p in summed.values() if p.grad is not None)
        if gradients:
            copies.all_reduce(gradients)
        off = [name for name, (_, num_off, _) in by_name.items() if num_off]
        if off:
            apart = [off_grid.get(name) or ReproducibleSum(parameters[name]) for name in off]
            off_grid.update(zip(off, sums_over_workers(copies, apart), strict=True))


def _keep_part(p: nn.Parameter, num_copies: int) -> None:
    """Divides `p.grad`, which holds a sum over the copies, to this copy's part of it."""
    p.grad = torch.zeros_like(p) if p.grad is None else p.grad.detach() / num_copies


def check_divided(model: nn.Module, comm: Communicator, policy: ExchangePolicy) -> None:
    """Checks that a model's divided modules and shards fit these workers and this policy.

    Shards are exchanged by the workers that have the same ones. Gradients of divided modules must
    be of the current step, and of exactly the workers that the modules are divided over.

    Raises:
        UsageError: names the module or parameter and the cure.
    """
    _check_axes(model, comm)
    for name, array in arrays_of(model).items():
        if array.comm is comm:
            raise UsageError(
                f"`model.{name}` has a part of its filters on each of the {comm.size} workers of"
                " `comm`, which would all get rank 0's: attach the model to those that have the"
                ' same part, as mesh["data"] where the grid is made of mesh["model"].'
            )
    groups: dict[Communicator, str] = {}
    for name, modules in divided_modules(model).items():
        groups.setdefault(modules.comm, name)
        if len(groups) > 1:
            one, other = groups.items()
            raise UsageError(
                f"`model.{one[1]}` is divided over {one[0].size} workers, and `model.{other[1]}`"
                f" over {other[0].size}: give both as many `copies`."
            )
        if modules.workers is not comm:
            raise UsageError(
                f"`model.{name}` is divided over the {modules.workers.size} workers of another"
                f" communicator than `comm` (of {comm.size}): make the model with the one that it"
                " is attached to, and for copies along another axis give the layer `copies`."
            )
        if not isinstance(policy, Synchronous):
            raise UsageError(
                f"`policy` (={policy}) is for models that are whole on every worker, and"
                f" `model.{name}` is divided over them; use `Synchronous()`."
            )
        _refuse_shared(model, name, modules)


def _check_axes(model: nn.Module, comm: Communicator) -> None:
    """Checks that the exchange's workers are along an axis over which the model is not divided."""
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
    """Refuses a parameter that is both in a divided module and elsewhere in the model."""
    inside, own = set(divided.modules()), set(divided.parameters())
    others = ((prefix, module) for prefix, module in model.named_modules() if module not in inside)
    for prefix, module in others:
        for name, p in module.named_parameters(prefix, recurse=False):
            if p in own:
                raise UsageError(
                    f"Parameter `{name}` is also one of `model.{divided_name}`, which is divided"
                    " over the workers: give each a parameter of its own."
                )
