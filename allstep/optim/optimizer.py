"""What all optimizers here share: checks, state, master copies, bad gradients."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from allstep.errors import UsageError, check_choice
from allstep.optim.checks import (
    NonfiniteGradientError,
    check_gradient,
    check_parameters,
    check_values,
    find_nonfinite,
    parameter_name,
)
from allstep.optim.leaves import (
    Leaf,
    is_sharded,
    local_gradient,
    new_state,
    reduce_over_shards,
    update_dtype,
)
from allstep.torch_classes import local_part

Nonfinite = Literal["raise", "skip", "propagate"]

# Which kernels compute is no part of what is computed.
_KERNELS = ("foreach", "fused")


class LargeBatchOptimizer(Optimizer, ABC):
    """The base class of allstep's optimizers, a subclass of torch's `Optimizer`.

    - Gradients are left bit for bit as they were; sparse ones are refused by name.
    - Parameters of half precision are updated through a float32 master copy, which is part of
      the state. Where such a parameter was changed from outside, its master follows.
    - Sharded parameters (`DTensor`) get the update that whole ones would.
    - `nonfinite` says what a gradient that is not finite does: "raise" stops before its
      parameter is changed and names it (others may have made their step: go back to a
      checkpoint), "skip" leaves everything as it was and counts (`num_skipped`), at the price of
      reading all gradients first, "propagate" does not look.
    """

    # Elements of parameters that are updated together on a CPU: they and what is made of them
    # should fit the cache. A larger parameter is a batch of its own.
    batch_elements: int = 2**21

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, nonfinite: Nonfinite, **options: Any
    ) -> None:
        check_choice("nonfinite", nonfinite, get_args(Nonfinite))
        if not isinstance(params, Iterable):
            raise UsageError(
                f"`params` (={params!r}) must be parameters or groups of them; pass"
                " `model.parameters()`."
            )
        params = params if isinstance(params, Tensor) else list(params)
        if not isinstance(params, Tensor) and not params:
            raise UsageError("`params` is empty; pass `model.parameters()` or parameter groups.")
        self._options: dict[str, Any] = {"nonfinite": nonfinite, **options}
        super().__init__(params, {**defaults, "num_skipped": 0})

    # --- what a subclass says -------------------------------------------------------------------

    @abstractmethod
    def _slots(self) -> tuple[str, ...]:
        """Names of the state's tensors of a parameter's shape."""

    @abstractmethod
    def _update(self, leaves: list[Leaf]) -> None:
        """Makes a step: calls `_tolerates` and `_count`, and changes weights and states."""

    # --- torch's interface ----------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters from their gradients.

        Args:
            closure: computes the loss and the gradients anew.

        Returns:
            What `closure` returned.

        Raises:
            UsageError: if a gradient is sparse.
            NonfiniteGradientError: if a gradient is not finite and the policy is "raise".
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            leaves = self._leaves()
            if leaves:
                self._update(leaves)
            for leaf in leaves:
                leaf.write_back()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters with options of its own.

        Raises:
            UsageError: if the group is empty, overlaps another or has a bad option.
        """
        if isinstance(param_group, dict) and "params" not in param_group:
            raise UsageError(
                f"group {len(self.param_groups)} (={', '.join(map(repr, param_group)) or 'empty'})"
                " lacks `params`; put its parameters there."
            )
        if isinstance(param_group, dict) and not isinstance(param_group["params"], set):
            given = param_group["params"]
            listed = [given] if isinstance(given, Tensor) else list(given)
            param_group = {**param_group, "params": listed}
            bare = [item[1] if isinstance(item, tuple) else item for item in listed]
            group = {**param_group, "params": bare}
            check_parameters(group, len(self.param_groups))
            self._refuse_overlap(bare)
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        check_values(group)
        for name, value in self._options.items():
            if group.get(name, value) != value:
                raise UsageError(
                    f"`{name}` (={group[name]!r}) of a group must be the optimizer's own"
                    f" (={value!r}), as it is one for all groups; or make another optimizer."
                )
        if group["capturable"] and self.nonfinite != "propagate":
            raise UsageError(
                f"`nonfinite` (={self.nonfinite!r}) looks at numbers on the GPU, which"
                ' `capturable` forbids; use `nonfinite="propagate"`.'
            )

    def _refuse_overlap(self, parameters: list[Tensor]) -> None:
        places = {
            parameter: parameter_name(group, group_index, index)
            for group_index, group in enumerate(self.param_groups)
            for index, parameter in enumerate(group["params"])
        }
        twice = [places[parameter] for parameter in parameters if parameter in places]
        if twice:
            raise UsageError(
                f"group {len(self.param_groups)} overlaps an earlier one: it also holds"
                f" {', '.join(twice[:5])}. Put every parameter in one group."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state from `state_dict()`.

        The state of another optimizer that keeps the same may be loaded too, as that of AdamW by
        LAMB, or one of parameters in another precision: options that its groups lack stay as they
        are here, and parameters of half precision that had no master copy get one. What is loaded
        is what the user's pre-hooks have made of it; post-hooks see all of it loaded.

        Raises:
            UsageError: if it lacks what this optimizer keeps, or has options that it can't have.
            ValueError: if the groups differ from those of this optimizer.
        """
        own = [dict(group) for group in self.param_groups]
        given: dict[str, Any] = {}

        def check(_: Optimizer, final: dict[str, Any]) -> None:
            self._check_state_dict(final)
            given.update(final)

        hooks = (
            self.register_load_state_dict_pre_hook(check),  # after the user's own ...
            self.register_load_state_dict_post_hook(  # ... and before them
                lambda _: self._complete_loaded(given, own), prepend=True
            ),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for key, state in state_dict["state"].items():
            self._refuse_foreign(key, state)
        for index, (saved, own) in enumerate(
            zip(state_dict["param_groups"], self.param_groups, strict=False)
        ):
            self._refuse_other_order(saved, own)
            self._refuse_other_shapes(state_dict["state"], saved, own, index)
            kept = {name: value for name, value in saved.items() if name not in _KERNELS}
            try:
                self._check_group({**own, **kept})
            except UsageError as error:
                raise UsageError(f"`state_dict` doesn't fit this optimizer: {error}") from None

    def _complete_loaded(
        self, state_dict: Mapping[str, Any], own_groups: list[dict[str, Any]]
    ) -> None:
        """Adds options to groups, and the precision to states, that a state dict lacks."""
        for group, own in zip(self.param_groups, own_groups, strict=True):
            for name, value in own.items():
                group.setdefault(name, value)
            if "param_names" in own:
                group["param_names"] = own["param_names"]
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, parameters, strict=True):
            state = self.state.get(parameter)
            if state:
                for name, value in state_dict["state"][key].items():
                    if name == "step" and not isinstance(value, Tensor):
                        value = torch.tensor(float(value))  # torch's optimizers take it, too
                    if isinstance(value, Tensor):
                        state[name] = _loaded(name, value, parameter)
                self._complete(state, parameter)

    def _complete(self, state: dict[str, Tensor], parameter: Tensor) -> None:
        """Adds the master copy and the precision that a new state would have."""
        dtype = update_dtype(parameter)
        for name in self._slots():
            state[name] = state[name].to(dtype)
        if dtype == parameter.dtype:
            state.pop("master", None)
        elif "master" not in state:
            state["master"] = parameter.detach().to(dtype)

    def _has_other_precision(self, state: Mapping[str, Tensor], parameter: Tensor) -> bool:
        """Whether a state's precision differs from that of a new one."""
        dtype = update_dtype(parameter)
        updated = (state.get("master", parameter), *(state[name] for name in self._slots()))
        return any(tensor.dtype != dtype for tensor in updated)

    def _refuse_foreign(self, key: Any, state: Mapping[str, Any]) -> None:
        missing = [name for name in ("step", *self._slots()) if name not in state]
        if state and missing:
            raise UsageError(
                f"`state_dict` (of another optimizer) has {', '.join(state)} of parameter {key},"
                f" and no {', '.join(missing)}, which {type(self).__name__} keeps. Load it into an"
                " optimizer of its own kind, or begin without it."
            )
        step = state.get("step", 0)
        is_number = isinstance(step, Real) and 0 <= float(step) < math.inf
        if not isinstance(step, Tensor) and not is_number:
            raise UsageError(
                f"`state_dict` has `step` (={step!r}) of parameter {key}, which must be a number of"
                " steps, 0 or more."
            )

    def _refuse_other_order(self, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        given, expected = saved.get("param_names", ()), own.get("param_names", ())
        if given != expected and sorted(given) == sorted(expected):
            first, other = next(
                pair for pair in zip(given, expected, strict=True) if len({*pair}) > 1
            )
            raise UsageError(
                f"`state_dict` has `{first}` where this optimizer has `{other}`: states would go to"
                " other parameters. Give both the parameters in the same order."
            )

    def _refuse_other_shapes(
        self,
        states: Mapping[Any, Mapping[str, Any]],
        saved: Mapping[str, Any],
        own: Mapping[str, Any],
        group_index: int,
    ) -> None:
        """Raises UsageError for states of other shapes; a fused kernel would write beyond them."""
        for index, (key, parameter) in enumerate(zip(saved["params"], own["params"], strict=False)):
            for name in (*self._slots(), "master"):
                value = states.get(key, {}).get(name)
                if isinstance(value, Tensor) and value.shape != parameter.shape:
                    raise UsageError(
                        f"`state_dict` has `{name}` (={list(value.shape)}) of"
                        f" {parameter_name(own, group_index, index)}, whose shape is"
                        f" {list(parameter.shape)}: it is of another model, or of one whose"
                        " parameters have another order."
                    )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def _shows_later(self, leaf: Leaf) -> bool:
        """Whether the step finds a nonfinite gradient before it changes the parameter."""
        return False

    # --- bad gradients --------------------------------------------------------------------------

    @property
    def nonfinite(self) -> Nonfinite:
        """The policy for gradients that are not finite."""
        policy: Nonfinite = self._options["nonfinite"]
        return policy

    @property
    def num_skipped(self) -> int:
        """The number of steps skipped because of a gradient that was not finite."""
        counts: list[int] = [group["num_skipped"] for group in self.param_groups]
        return max(counts)

    def _bad_gradients(self, leaves: list[Leaf]) -> list[bool]:
        """The parameters with nonfinite gradients, if the policy needs them before the step."""
        skips = self.nonfinite == "skip"
        early = [skips or not self._shows_later(leaf) for leaf in leaves]
        seen = [leaf for leaf, is_early in zip(leaves, early, strict=True) if is_early]
        if self.nonfinite == "propagate" or not seen:
            return [False] * len(leaves)
        bad = find_nonfinite([leaf.gradient for leaf in seen])
        if any(leaf.is_sharded for leaf in seen):
            found = torch.tensor([bad], dtype=torch.float64, device=seen[0].weight.device)
            reduce_over_shards(found, seen, "max")
            bad = found[0].tolist()
        flags = iter(bad)
        return [is_early and next(flags) > 0 for is_early in early]

    def _tolerates(self, leaves: list[Leaf], bad: list[bool]) -> bool:
        """Whether to make the step, by the policy; skipped steps are counted.

        Raises:
            NonfiniteGradientError: if the policy is "raise" and a gradient is bad.
        """
        names = [leaf.name for leaf, is_bad in zip(leaves, bad, strict=True) if is_bad]
        if names and self.nonfinite == "raise":
            raise NonfiniteGradientError(names)
        if names:
            for group in self.param_groups:
                group["num_skipped"] += 1
        return not names

    def _count(self, leaves: list[Leaf]) -> None:
        torch._foreach_add_([leaf.state["step"] for leaf in leaves], 1)

    # --- leaves ---------------------------------------------------------------------------------

    def _leaves(self) -> list[Leaf]:
        """The parameters that have a gradient, in the order of the groups."""
        leaves = []
        for group_index, group in enumerate(self.param_groups):
            check_values({"lr": group["lr"]})
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    name = parameter_name(group, group_index, index)
                    leaves.append(self._leaf(parameter, group, name))
        return leaves

    def _leaf(self, parameter: Tensor, group: dict[str, Any], name: str) -> Leaf:
        assert parameter.grad is not None
        check_gradient(parameter.grad, name)
        state = self.state[parameter]
        if not state:
            state.update(new_state(parameter, self._slots()))
        elif self._has_other_precision(state, parameter):  # as after `model.bfloat16()`
            self._complete(state, parameter)
        weight = local_part(parameter.detach())
        if "master" in state:
            weight = _follow(weight, local_part(state["master"]))
        gradient = local_gradient(parameter)
        return Leaf(name, group, parameter, weight, gradient, state, is_sharded(parameter))


def _follow(rounded: Tensor, master: Tensor) -> Tensor:
    """The master copy, after it has taken over what other code wrote into its parameter.

    Whole parameters are compared: a write through `.data` leaves no other trace.
    """
    kept = master.to(rounded.dtype) == rounded
    return master.copy_(torch.where(kept, master, rounded.float()))


def _loaded(name: str, value: Tensor, parameter: Tensor) -> Tensor:
    """A state's tensor on the update's device, in the update's dtype.

    torch casts to the parameter's dtype, which would round master copies, and leaves `step`
    where it was read to.
    """
    if name == "step":
        return value.to(parameter.device, torch.float32, copy=True)
    if value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
