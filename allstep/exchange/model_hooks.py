"""The hooks of an exchange on its model, from `attach` to `detach`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from allstep.exchange.hooks import FunctionHook, Hook, ModuleHook, Removable


class ModelHooks:
    """Hooks on a model's modules and parameters; those of modules keep the exchange alive.

    [Note: hooks and the collector]

    Args:
        exchange: the exchange that owns the hooks.
        model: the attached model; it is marked as attached at once.
        before_copy: called before the model's values are copied: to a state dict, a copy of the
            model, or an `AveragedModel`, which reads them by `model.buffers()`.
        before_forward: called before the model's forward.
        before_lazy_forward: called before the forward of a module without parameters yet.
        on_output_gradient: called in backward before the model's first gradient.
        of_parameter: name, parameter -> new hooks on it.
    """

    def __init__(
        self,
        exchange: object,
        model: nn.Module,
        *,
        before_copy: Callable[[], None],
        before_forward: Callable[..., None],
        before_lazy_forward: Callable[..., None],
        on_output_gradient: Callable[[Tensor], None],
        of_parameter: Callable[[str, nn.Parameter], list[Removable]],
    ) -> None:
        self._exchange = exchange
        self._model = model
        self._before_forward = FunctionHook(exchange, before_forward)
        self._before_lazy_forward = FunctionHook(exchange, before_lazy_forward)
        self._on_output_gradient = on_output_gradient
        self._of_parameter = of_parameter
        self._of_model: list[Removable] = []
        self._of_lazy_modules: list[Removable] = []
        self._of_parameters: dict[nn.Parameter, list[Removable]] = {}
        self._newest: list[tuple[Mapping[int, object], int]] = []  # hooks, and which is ours

        def before_state_dict(_module: object, _prefix: str, keep_vars: bool) -> None:
            if not keep_vars:  # which gives the tensors to look at
                before_copy()

        # The mark is on an event that costs nothing in a step.
        hook = FunctionHook(exchange, before_state_dict)
        self._hook_model(model.register_state_dict_pre_hook, hook)

        def buffers(recurse: bool = True) -> Iterator[Tensor]:
            before_copy()
            return type(model).buffers(model, recurse)

        model.__dict__["buffers"] = FunctionHook(exchange, buffers)

    def follow_forward(self) -> None:
        """Registers hooks on the model's forward, and on the gradients of its outputs."""

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                outputs = (output,) if isinstance(output, Tensor) else pytree.tree_leaves(output)
                for tensor in outputs:
                    if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                        tensor.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]

        self._hook_model(self._model.register_forward_pre_hook, self._before_forward)
        self._hook_model(self._model.register_forward_hook, FunctionHook(self._exchange, after))

    def follow_lazy_modules(self, modules: Iterable[nn.Module]) -> None:
        """Registers hooks on the forward of lazy modules, and removes those of others."""
        _remove_all(self._of_lazy_modules)
        for module in modules:
            own = chain(module._parameters.values(), module._buffers.values())
            if any(is_lazy(tensor) for tensor in own if tensor is not None):
                register = module.register_forward_pre_hook
                self._of_lazy_modules.append(
                    ModuleHook(module, register, self._before_lazy_forward)
                )

    def follow_gradients(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Registers hooks on these parameters anew, under their present names; removes others."""
        old, self._of_parameters = self._of_parameters, {}
        for name, p in trained.items():
            _remove_all(old.pop(p, []))
            self._of_parameters[p] = self._of_parameter(name, p)
        for handles in old.values():
            _remove_all(handles)
        by_number = [p._post_accumulate_grad_hooks for p in self._of_parameters]
        self._newest = [(hooks, next(reversed(hooks))) for hooks in by_number]

    def are_newest(self) -> bool:
        """Whether no later hook could change a gradient after it was sent; cheap."""
        return all(next(reversed(hooks)) == number for hooks, number in self._newest)

    def remove(self) -> None:
        """Removes all hooks."""
        for handles in (self._of_model, self._of_lazy_modules, *self._of_parameters.values()):
            _remove_all(handles)
        self._of_parameters.clear()
        self._newest.clear()
        self._model.__dict__.pop("buffers", None)

    def _hook_model(self, register: Callable[..., Any], hook: Hook) -> None:
        self._of_model.append(ModuleHook(self._model, register, hook))


def _remove_all(handles: list[Removable]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
