"""Passes through models that FSDP2 has sharded, of which all workers make equally many."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from allstep.comm import Communicator, Work, fsdp_modules
from allstep.errors import UsageError
from allstep.exchange.exact_shards import ExactShards
from allstep.exchange.fully_sharded_use import PartsInUse
from allstep.exchange.hooks import ModuleHook, WeakHook, nothing


@dataclass(frozen=True)
class _Call:
    """A call of the model, which can be repeated."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_gradients: bool


class CollectivePasses:
    """Passes through a model that FSDP2 has sharded.

    [Note: fully sharded models] Each worker keeps a shard of every parameter; FSDP2 gathers them
    for each pass and sums gradients by itself, so that as soon as backward has returned

        grad = scale * sum_r grad_r

    of the shard, with the scale of every other gradient: 1 for a global batch. The exchange has
    no gradients left to send. Every pass through the model is collective: a worker with fewer
    micro-batches than another ends with passes of zero loss, which call the model as its last
    micro-batch did. Experts that FSDP2 leaves to their workers run for the others' tokens in them,
    in the same order as in any pass.

    [Note: casts of shards] A parameter that autocast has cast in an earlier micro-batch, and kept,
    would get its gradient after FSDP2 has sent those of this one: backward passes go from new nodes
    to old ones. So what autocast keeps is dropped before each micro-batch.

    Args:
        model: sharded by `fully_shard`.
        comm: the workers.
        exact: rounds gradients, for exact sums. [Note: exact shards]

    Attributes:
        parts: what the passes use of the model.
    """

    def __init__(
        self, model: nn.Module, comm: Communicator, exact: ExactShards | None = None
    ) -> None:
        self._model = model
        self._comm = comm
        self._exact = exact
        self._modules = list(fsdp_modules(model).values())
        rounded = None if exact is None else WeakHook(exact, ExactShards.round)
        self.parts = PartsInUse(model, rounded)
        self.reshard()
        # Of the last micro-batch, without gradients and with them.
        self._calls_by_mode: tuple[list[_Call], list[_Call]] = [], []
        self._calls = self._calls_by_mode[True]
        self._told: Work[Tensor] | None = None  # to all, when this batch began
        self._num_passes = 0  # of this batch
        self._num_missing = 0  # that others make more
        self._is_noting = False  # calls, which a micro-batch makes
        for module in self._modules:  # Gloo and other backends may have no other reduction
            module.set_force_sum_reduction_for_comms(True)
        register = partial(model.register_forward_pre_hook, with_kwargs=True)
        self._hook = ModuleHook(model, register, WeakHook(self, type(self)._note_call))
        if exact is not None:
            for module, members in zip(self._modules, self.parts.members.values(), strict=True):
                names = [prefix + own for prefix, each in members for own in each._parameters]
                module.set_all_reduce_hook(WeakHook(exact, ExactShards.add_up_early, names))

    def detach(self) -> None:
        """Leaves the model to FSDP2."""
        self._hook.remove()
        self.parts.detach()
        for module in self._modules:
            module.set_force_sum_reduction_for_comms(False)
            module.set_gradient_divide_factor(float(self._comm.size))
            if self._exact is not None:
                module.set_all_reduce_hook(nothing)

    def reshard(self) -> None:
        """Frees what a pass without gradients has gathered: parameters are shards again."""
        for module in self._modules:
            module.reshard()

    def set_scale(self, scale: float) -> None:
        """Sets the scale of the sums that FSDP2 makes from now on."""
        for module in self._modules:
            module.set_gradient_divide_factor(1 / scale)

    def begin_batch(self, num_passes: int) -> None:
        """Called at the start of a global batch, or of an evaluation without gradients. Collective.

        Workers tell each other how many passes they make, and wait for that only before the first
        one, when they have read its samples.

        Args:
            num_passes: that this worker is about to make, one for each micro-batch as a rule.
        """
        self._calls = self._calls_by_mode[torch.is_grad_enabled()]
        is_stuck = num_passes == 0 and not self._calls
        told = torch.tensor([num_passes, is_stuck], device=self._comm.device)
        self._told = self._comm.all_reduce(told, "max", async_op=True)
        self._num_passes = num_passes
        self._is_noting = False
        self.parts.begin()

    def _meet(self) -> None:
        """Waits for what all have told, before the first pass.

        So a worker that was lost between two steps has a name: what FSDP2 sends without us ends
        with the backend's words.

        Raises:
            UsageError: on all workers, if one has no pass to make, and has not made any yet.
        """
        if self._told is None:
            return
        (most, is_any_stuck), self._told = self._told.wait().tolist(), None
        if is_any_stuck and most:
            raise UsageError(
                "A worker has no micro-batch of the first global batch, or of the first evaluation,"
                " and FSDP2 wants all workers to call the model equally often: let the first have"
                f" at least {self._comm.size} micro-batches, one for each worker."
            )
        self._num_missing = most - self._num_passes

    def begin_micro_batch(self) -> None:
        """The calls that follow are another micro-batch's. [Note: casts of shards]

        Raises:
            UsageError: before the first, if a worker can't go on; see `_meet`.
        """
        self._meet()
        torch.clear_autocast_cache()
        self._end_micro_batch()
        self._calls.clear()
        self._is_noting = True
        self._begin_pass()

    def _begin_pass(self) -> None:
        if self._exact is not None:
            self._exact.sums.begin_micro_batch(self._exact.off_grid)

    def _end_micro_batch(self) -> None:
        if self._is_noting:
            self.parts.end_pass()
        self._is_noting = False

    def join_others(self) -> None:
        """Takes part in the passes of workers with more micro-batches. Collective."""
        self._meet()
        self._end_micro_batch()
        for _ in range(self._num_missing):
            self._begin_pass()
            self._pass_with_zero_loss()
            self.parts.end_pass(is_counted=False)
        self._num_missing = 0
        if not torch.is_grad_enabled():
            self.reshard()

    def _pass_with_zero_loss(self) -> None:
        zeros: list[Tensor] = []
        for call in self._calls:
            with torch.set_grad_enabled(call.has_gradients and torch.is_grad_enabled()):
                args, kwargs = pytree.tree_map(_detached, (call.args, call.kwargs))
                outputs = pytree.tree_leaves(self._model(*args, **kwargs))
            tensors = (x for x in outputs if isinstance(x, Tensor) and x.requires_grad)
            zeros.extend(0 * x.sum() for x in tensors)
        if zeros:
            torch.autograd.backward(zeros)  # each by itself, as some may be DTensors

    def _note_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_noting:
            self._calls.append(_Call(args, kwargs, torch.is_grad_enabled()))


def _detached(x: Any) -> Any:
    """The arguments, detached from the graph."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
