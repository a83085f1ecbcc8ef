"""Finds the parameters whose gradients FSDP2 passes to a hook without names."""

import weakref
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from allstep.errors import UsageError, named_part
from allstep.exchange.policy import ExchangePolicy


class SameGradients:
    """Checks that parameters whose gradients come side by side are always the same ones.

    FSDP2 leaves out parameters that this worker did not use. Another one of the same size in its
    place would get its gradients of earlier steps, and what was not sent of them. Behind the hook
    that sums them FSDP2 calls those on each parameter's accumulated gradient, in the same order.

    Args:
        model: sharded by `fully_shard`.
        policy: what keeps earlier gradients, for messages.
    """

    def __init__(self, model: nn.Module, policy: ExchangePolicy) -> None:
        self._policy = policy
        self._sizes: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}  # by module, in FSDP2's order
        self._module, self._number, self._is_first = "", 0, False
        # Parameters must not keep it; see [Note: hooks and the collector].
        note = _weakly(weakref.WeakMethod(self._note))
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(note, name))  # type: ignore[no-untyped-call]

    def begin(self, module: str, flat: Tensor) -> None:
        """Gradients of a module follow.

        Raises:
            UsageError: if they are not as many elements as before.
        """
        self._is_first = module not in self._sizes
        if self._sizes.setdefault(module, flat.numel()) != flat.numel():
            raise UsageError(other_gradients_message(module, self._policy))
        self._module, self._number = module, 0

    def _note(self, name: str) -> None:
        """Records a parameter that FSDP2 has just given its gradient."""
        names = self._names.setdefault(self._module, [])
        if self._is_first:
            names.append(name)
        elif self._number < len(names) and names[self._number] != name:
            raise UsageError(
                other_gradients_message(self._module, self._policy)
                + f" It is `{name}` now, and was `{names[self._number]}`."
            )
        self._number += 1


def other_gradients_message(module: str, policy: ExchangePolicy) -> str:
    """The error for gradients that can't be told from those of other parameters."""
    return (
        f"Other parameters of {named_part(module)} than before have a gradient, and `policy`"
        f" (={policy}) keeps earlier gradients, which FSDP2 gives no names: call"
        " `set_reduce_scatter_unused_params(True)` on the model (torch 2.13), or"
        " `allstep.fsdp_hook` again after layers were frozen; `Synchronous()` in 32 or 16 bits"
        " keeps none."
    )


def _weakly(method: "weakref.WeakMethod[Callable[[str], None]]") -> Callable[[str, Tensor], None]:
    def call(name: str, _: Tensor) -> None:
        note = method()
        if note is not None:
            note(name)

    return call
