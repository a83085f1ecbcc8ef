"""The modules and parameters of an FSDP2 model that the passes of a global batch use."""

import itertools
from collections.abc import Callable, Container
from functools import partial

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # imports what `torch.compiler.disable` does, but late

from allstep.comm import fsdp_modules, local_parameters
from allstep.comm.agreement import Details
from allstep.errors import UsageError
from allstep.exchange.hooks import AccumulationHook, ModuleHook, Removable, WeakHook
from allstep.torch_classes import is_dtensor

_CURE = (
    "FSDP2 sends parameters and gradients in the order in which a worker calls the modules that"
    " `fully_shard` was called on: call each of them in every pass, and skip what is inside of it,"
    " or call `fully_shard` on the whole model only."
)
_OLD_CURE = " Parameters of such a module that only some workers use need torch 2.13."


class PartsInUse:
    """Records which sharded modules are called, and which of their parameters get gradients.

    [Note: parts in use] FSDP2 sends the parameters of a module when it is called, and after it
    those gradients that this worker has. Where workers skip different layers, or use different
    parameters of one, it would add up what is of one size in silence, and break off elsewhere. So
    workers send zeros for parameters that they did not use; between `begin` and `end` they note
    what they call. The exchange compares that before anything is made of the sums, and those
    parameters that no worker used have no gradient in the end, as in one process.

    Args:
        model: sharded by `fully_shard`.
        rounded: name, gathered parameter, gradient -> what takes the gradient's place, or None.

    Attributes:
        members: name -> the modules whose parameters FSDP2 gathers together, of each it was called
            on, with what the names of their parameters begin with.
    """

    def __init__(self, model: nn.Module, rounded: Callable[..., Tensor | None] | None) -> None:
        self._rounded = rounded
        self._modules = fsdp_modules(model)
        self.members = _members_by_module(model)
        # Those of experts are no DTensors.
        self._sharded = dict.fromkeys(n for n, p in model.named_parameters() if is_dtensor(p))
        self._hooks = []
        for name in self._modules:
            module = model.get_submodule(name)
            hook = WeakHook(self, type(self)._note_call, name)
            self._hooks.append(ModuleHook(module, module.register_forward_pre_hook, hook))
        self._can_send_zeros = all(
            hasattr(module, "set_reduce_scatter_unused_params") for module in self._modules.values()
        )
        self._send_zeros(True)
        self._hooks_of_whole: dict[nn.Parameter, list[Removable]] = {}
        self._has_begun = False
        self._called: list[str] = []
        self._used: set[str] = set()
        self._used_in_pass: set[str] = set()
        self._without: dict[str, Tensor] = {}  # a gradient, when it began

    def detach(self) -> None:
        """Leaves the model to FSDP2."""
        for hook in (*self._hooks, *itertools.chain(*self._hooks_of_whole.values())):
            hook.remove()
        self._send_zeros(False)

    def begin(self) -> None:
        """The passes of a global batch begin, or those of an evaluation."""
        self._has_begun = True
        self._called.clear()
        self._used.clear()
        self._used_in_pass.clear()
        self._without = {
            prefix + own_name: p
            for prefix, member in itertools.chain(*self.members.values())
            for own_name, p in member._parameters.items()
            if p is not None and p.grad is None and prefix + own_name in self._sharded
        }

    def end_pass(self, *, is_counted: bool = True) -> None:
        """Called at the end of a pass.

        Args:
            is_counted: False for a pass in which the worker only joins the others.
        """
        if is_counted:
            self._used |= self._used_in_pass
        if self._used_in_pass and not self._can_send_zeros:  # all must have the same ones
            self._called.append(f"gradients of {sorted(self._used_in_pass)}")
        self._used_in_pass.clear()

    @property
    def calls(self) -> Details:
        """The modules that this worker has called since `begin`; must be equal on all workers."""
        return [(f"call {number}", name) for number, name in enumerate(self._called)]

    @property
    def cure(self) -> str:
        """Ends the error where it is not."""
        return _CURE if self._can_send_zeros else _CURE + _OLD_CURE

    def has_gradient(self) -> dict[str, bool]:
        """name -> whether this worker has a gradient of its own for a sharded parameter."""
        return {n: n in self._used or n not in self._without for n in self._sharded}

    def end(self, with_gradient: Container[str]) -> None:
        """Takes away the gradients of what no worker has used.

        Args:
            with_gradient: names of those that any has a gradient for.
        """
        self._has_begun = False
        for name, p in self._without.items():
            if name not in with_gradient:
                p.grad = None
        self._called.clear()
        self._without = {}

    def _send_zeros(self, is_on: bool) -> None:
        """Whether FSDP2 sums zeros in place of gradients that this worker does not have."""
        if self._can_send_zeros:
            for module in self._modules.values():
                module.set_reduce_scatter_unused_params(is_on)

    @_disable_dynamo  # it would look at tensors that FSDP2 has freed
    def _note_call(self, name: str, module: nn.Module, _: object) -> None:
        """FSDP2 has gathered the module's parameters, in tensors that it keeps for later calls."""
        if not self._has_begun:
            return
        self._called.append(name or type(module).__name__)
        for prefix, member in self.members[name]:
            for own_name, p in local_parameters(member).items():
                if p.requires_grad and p not in self._hooks_of_whole:
                    self._hook_whole(prefix + own_name, p)

    def _hook_whole(self, name: str, p: nn.Parameter) -> None:
        """Notes the gradients of a gathered parameter, and rounds them."""
        if name not in self._sharded or is_dtensor(p):  # a lone worker's expert, a shard as it is
            return
        hook = WeakHook(self, type(self)._note_gradient, name)
        handle = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._hooks_of_whole[p] = [handle]
        if self._rounded is not None:
            _check_can_be_exact(name, p)
            rounded = partial(self._rounded, name, p)
            self._hooks_of_whole[p].append(AccumulationHook(p, rounded))

    def _note_gradient(self, name: str, _: Tensor) -> None:
        self._used_in_pass.add(name)


def _members_by_module(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    members: dict[str, list[tuple[str, nn.Module]]] = {name: [] for name in fsdp_modules(model)}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        around = [name for name in members if prefix.startswith(f"{name}." if name else "")]
        if around and module._parameters:
            members[max(around, key=len)].append((prefix, module))
    return members


def _check_can_be_exact(name: str, whole: nn.Parameter) -> None:
    """Raises UsageError for parameters whose gradients can't be exact sums under FSDP2."""
    if whole.dtype not in (torch.float32, torch.float64):
        raise UsageError(
            f"`{name}` is gathered as {whole.dtype}, in which no gradient has an exact sum: leave"
            " `param_dtype` out of FSDP2's `MixedPrecisionPolicy` and call the model in"
            " `torch.autocast`, or choose another `compression` (='exact')."
        )
