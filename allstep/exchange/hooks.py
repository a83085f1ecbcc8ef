"""Hooks that copies of the model don't inherit."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from allstep.errors import UsageError

T = TypeVar("T")


def is_in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Removable(Protocol):
    """A handle that removes a hook."""

    def remove(self) -> None: ...


class Hook:
    """A hook on a module or parameter, which a copy of the model does not inherit.

    `copy.deepcopy` and `pickle` copy a module's hooks, and with a bound method everything that it
    refers to: here the exchange, its communicator and the original model. `ModuleHook` leaves a
    hook out of its module's copies; elsewhere a function that does nothing is copied in its place.

    Args:
        owner: the object that registered it.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @property
    def owner(self) -> Any:
        """The object that registered the hook."""
        return self._owner

    def __call__(self, *args: Any) -> Any:
        """Does nothing; the hook only marks that its owner was registered."""

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copied_hook, ()


class FunctionHook(Hook):
    """A hook that calls a function."""

    def __init__(self, owner: object, function: Callable[..., Any]) -> None:
        super().__init__(owner)
        self._function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)


class WeakHook(Hook):
    """A hook that calls a function with its owner and `first_args`; refers to the owner weakly.

    [Note: hooks and the collector] Python's garbage collector does not see a parameter's hooks for
    accumulated gradients. If one referred to its exchange, and so to the model, neither would ever
    be freed. The hooks of the model's modules, which the collector sees, keep the exchange alive
    as long as the model.
    """

    def __init__(self, owner: object, function: Callable[..., Any], *first_args: Any) -> None:
        super().__init__(weakref.ref(owner))
        self._function = function
        self._first_args = first_args

    @property
    def owner(self) -> Any:
        """The object that registered the hook; None if it no longer exists."""
        return self._owner()

    def __call__(self, *args: Any) -> Any:
        owner = self._owner()
        if owner is None:
            raise UsageError(
                "The model of this parameter is gone, and with it what exchanged its gradient;"
                " keep the model, or what `allstep.attach` returned."
            )
        return self._function(owner, *self._first_args, *args)


class ModuleHook:
    """A hook that is left out of copies of the module, pickled or not.

    [Note: what is copied of a module] `pickle` and `copy` call an object's `__getstate__`, also one
    in its `__dict__`. As long as there are such hooks, the module has one there that leaves out the
    hooks and itself; before, it calls the hooks on a state dict, because a copy has the same
    values. A module may hold handles of its own hooks, as lazy ones do; a handle refers to the dict
    of the hook, which is replaced by the copied dict.

    Args:
        module: the module.
        register: the module's bound method that registers the hook.
        hook: the function to call.
    """

    def __init__(self, module: nn.Module, register: Callable[..., Any], hook: Hook) -> None:
        self._module = module
        self._handle: Removable = register(hook)
        module.__dict__.setdefault("__getstate__", _StateWithoutHooks(module))

    def remove(self) -> None:
        """Removes it."""
        self._handle.remove()
        attributes = self._module.__dict__
        others = (hook for hooks in _hooks_of(attributes).values() for hook in hooks.values())
        if not any(isinstance(hook, Hook) for hook in others):
            attributes.pop("__getstate__", None)


class _StateWithoutHooks(Hook):
    """The `__getstate__` of a hooked module."""

    def __call__(self) -> Any:
        for hook in self.owner._state_dict_pre_hooks.values():
            if isinstance(hook, Hook):
                hook(self.owner, "", False)
        kind: Any = type(self.owner)
        state = kind.__getstate__(self.owner)
        attributes, *slots = state if isinstance(state, tuple) else (state,)
        if isinstance(attributes, dict):  # else the class has a way of its own
            attributes = _without_hooks(attributes)
        return (attributes, *slots) if slots else attributes


def _hooks_of(attributes: dict[str, Any]) -> dict[str, dict[int, Any]]:
    """A module's dicts of hooks by their names."""
    return {
        name: value
        for name, value in attributes.items()
        if name.endswith("_hooks") and isinstance(value, dict)
    }


def _without_hooks(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes without our hooks; handles of its own hooks refer to the new dicts."""
    hooked = {
        name: hooks
        for name, hooks in _hooks_of(attributes).items()
        if any(isinstance(hook, Hook) for hook in hooks.values())
    }
    kept = {
        name: type(hooks)((key, x) for key, x in hooks.items() if not isinstance(x, Hook))
        for name, hooks in hooked.items()
    }
    instead = {id(hooks): kept[name] for name, hooks in hooked.items()}
    return {
        name: kept[name] if name in kept else _held(value, instead)
        for name, value in attributes.items()
        if not isinstance(value, Hook)
    }


def _held(value: Any, instead: dict[int, dict[int, Any]]) -> Any:
    """An attribute's value, with handles of replaced dicts of hooks changed to the new dicts."""
    leaves = pytree.tree_leaves(value)
    if not any(
        isinstance(x, RemovableHandle) and id(x.hooks_dict_ref()) in instead for x in leaves
    ):
        return value

    def moved(handle: RemovableHandle) -> RemovableHandle:
        hooks, *others = handle.__getstate__()  # type: ignore[no-untyped-call]
        found = RemovableHandle.__new__(RemovableHandle)
        found.__setstate__((instead.get(id(hooks), hooks), *others))
        return found

    return pytree.tree_map_only(RemovableHandle, moved, value)


class AccumulationHook:
    """A hook on a gradient that is about to be added to `p.grad`.

    Unlike a hook on the parameter it is not called by `torch.autograd.grad`, which adds to nothing.

    Args:
        p: the parameter.
        function: takes the gradient, or None if autograd knows that it is zero; its result is added
            instead, unless it is None.
    """

    def __init__(self, p: nn.Parameter, function: Callable[[Tensor | None], Tensor | None]) -> None:
        def call(gradients: tuple[Tensor | None]) -> tuple[Tensor] | None:
            instead = function(*gradients)
            return None if instead is None else (instead,)

        self._node = get_gradient_edge(p).node  # there only as long as somebody refers to it
        self._handle = self._node.register_prehook(call)

    def remove(self) -> None:
        """Removes it."""
        self._handle.remove()


def has_one_hook(p: nn.Parameter) -> bool:
    """Whether `p` has no other post-accumulate hook."""
    return len(p._post_accumulate_grad_hooks) == 1


def will_accumulate(p: nn.Parameter) -> bool:
    """Whether the running backward pass will add to `p.grad`; for hooks that run before it does."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(p).node))
    except RuntimeError:  # it is `torch.autograd.grad` of the parameter
        return False


def _copied_hook() -> Callable[..., None]:
    return nothing


def nothing(*_: Any) -> None:
    """Does nothing; replaces a hook in a copy, or one that can't be removed."""


def owners_of(hooks: dict[int, Any] | None, kind: type[T]) -> Iterator[T]:
    """The objects of a type that have registered some of the hooks."""
    for hook in (hooks or {}).values():
        if isinstance(hook, Hook) and isinstance(hook.owner, kind):
            yield hook.owner
