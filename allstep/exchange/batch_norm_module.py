"""A batch norm module with statistics of each micro-batch."""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from allstep.exchange.hooks import FunctionHook, Hook, ModuleHook, Removable

_MAX_SLOTS = 16  # micro-batches whose statistics are kept apart


def is_tracked(module: nn.Module) -> TypeGuard[_NormBase]:
    """Whether the module keeps running statistics (and has got its shape)."""
    if not isinstance(module, _NormBase) or module.running_mean is None:
        return False
    return not nn.parameter.is_lazy(module.running_mean)


class TrackedModule:
    """Takes the statistics of a module's training forwards in a micro-batch.

    During such a forward the module has scratch tensors for its running statistics, and
    momentum 1, so that it leaves the statistics of exactly that call there. It never holds
    them at any other time, so that evaluating the module, or saving it, is always right.
    The hooks are traceable by torch.compile; what is called in every forward is kept short,
    because after a convolution nothing of it is in the processor's caches.

    Attributes:
        is_active: inside a micro-batch.
        num_calls: calls in this micro-batch.
        lent: mean, variance and counter for this micro-batch's calls.
        is_local: whether the buffers have moved on their own since they were summed.
        shares: of this step's micro-batches that called the module; `slots` has their statistics.
        weight: share of this worker's history in the running statistics.
        num_steps: steps since the last sync. num_uses: those that used the module here.
    """

    def __init__(self, module: _NormBase, before_state_dict: Callable[..., None]) -> None:
        self.module = module
        self.is_active = False
        self.num_calls = 0
        self.shares: list[float] = []
        self.forget_part()
        self.own: tuple[Tensor | None, ...] | None = None  # the module's, while scratch is lent
        self._own_momentum: float | None = None
        self._allocate()
        self.before_forward = _BeforeForward(self)
        before, loaded = FunctionHook(self, before_state_dict), FunctionHook(self, self._on_loaded)
        self._handles: list[Removable] = [
            ModuleHook(module, module.register_forward_pre_hook, self.before_forward),
            ModuleHook(module, module.register_forward_hook, _AfterForward(self)),
            ModuleHook(module, module.register_state_dict_pre_hook, before),
            ModuleHook(module, module.register_load_state_dict_post_hook, loaded),
        ]

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def forget_part(self) -> None:
        """The buffers are all workers'."""
        self.weight, self.num_steps, self.num_uses = 1.0, 0, 0
        self.is_local = False

    def _on_loaded(self, _module: nn.Module, incompatible: Any) -> None:
        if not incompatible.missing_keys:  # else it may have kept its own
            self.forget_part()

    @property
    def running(self) -> tuple[Tensor, Tensor]:
        """The module's running mean and variance."""
        mean, var = self.module.running_mean, self.module.running_var
        assert mean is not None and var is not None
        return mean, var

    @property
    def num_batches_tracked(self) -> Tensor | None:
        """torch's counter; None where torch doesn't count."""
        counts = not isinstance(self.module, _InstanceNorm)
        return self.module.num_batches_tracked if counts else None

    def momentum(self) -> float:
        """The weight of this step's statistics in the running ones."""
        if self.module.momentum is not None:
            return self.module.momentum
        counter = self.num_batches_tracked
        if counter is None:
            return 0.0  # what torch's instance norm does
        return 1 / (int(counter) - self.num_uses + self.num_steps + 1)

    def start_step(self) -> None:
        """Forgets what the last step left."""
        mean, scratch = self.running[0], self.lent[0]
        if mean.device != scratch.device or mean.dtype != scratch.dtype:
            self._allocate()  # the model was moved
        self.shares = []

    def enter(self) -> None:
        """Called at the start of a micro-batch."""
        slot = len(self.shares)
        if slot == _MAX_SLOTS:
            self._merge_slots()
            slot = 1
        if slot == len(self.slots):
            self.slots.append(self._new_slot())
        self.lent = self.slots[slot]
        self.num_calls = 0
        self._own_momentum = self.module.momentum
        self.module.__dict__["momentum"] = 1.0  # nn.Module.__setattr__ is ten times as slow
        self.is_active = True

    def leave(self, share: float | None) -> None:
        """Called at a micro-batch's end; keeps its calls' mean statistics, unless it failed."""
        self.is_active = False
        self.module.__dict__["momentum"] = self._own_momentum
        if self.own is not None:
            self.give_back(self.own)  # a forward has raised
        if share is not None and self.num_calls:
            self.shares.append(share)
            if self.num_calls > 1:
                for total, last in zip(self.earlier, self.lent, strict=False):
                    last.add_(total).div_(self.num_calls)

    def drop(self, slot: tuple[Tensor, Tensor, Tensor]) -> None:
        """Forgets a micro-batch of this step, and empties its slot: 0 times NaN would stay NaN."""
        index = next(i for i, kept in enumerate(self.slots) if kept is slot)
        del self.shares[index]
        self.slots.append(self.slots.pop(index))
        for tensor in slot:
            tensor.zero_()

    def give_back(self, own: tuple[Tensor | None, ...]) -> None:
        """Takes the scratch tensors back."""
        buffers = self.module._buffers
        buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"] = own
        self.own = None

    def _allocate(self) -> None:
        self.slots = [self._new_slot()]
        self.lent = self.slots[0]
        self.earlier = self._new_slot()[:2]

    def _new_slot(self) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = self.running
        counter = torch.zeros((), dtype=torch.long, device=mean.device)
        return torch.zeros_like(mean), torch.zeros_like(var), counter

    def _merge_slots(self) -> None:
        """Makes the first slot the weighted mean of all."""
        total = sum(self.shares)
        for i in range(2):
            merged = self.slots[0][i].mul_(self.shares[0] / total)
            for share, slot in zip(self.shares[1:], self.slots[1:], strict=True):
                merged.add_(slot[i], alpha=share / total)
        self.shares = [total]


class _BeforeForward(Hook):
    """Lends the module scratch tensors for the statistics of one call."""

    owner: TrackedModule

    def __call__(self, module: _NormBase, _: Any) -> None:
        tracked = self.owner
        if not (tracked.is_active and module.training and module.track_running_stats):
            return
        if tracked.num_calls == 1:
            tracked.earlier[0].copy_(tracked.lent[0])
            tracked.earlier[1].copy_(tracked.lent[1])
        elif tracked.num_calls:
            tracked.earlier[0].add_(tracked.lent[0])
            tracked.earlier[1].add_(tracked.lent[1])
        buffers = module._buffers
        tracked.own = (
            buffers["running_mean"],
            buffers["running_var"],
            buffers["num_batches_tracked"],
        )
        (
            buffers["running_mean"],
            buffers["running_var"],
            buffers["num_batches_tracked"],
        ) = tracked.lent


class _AfterForward(Hook):
    """Takes them back."""

    owner: TrackedModule

    def __call__(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        tracked = self.owner
        if tracked.own is not None:
            tracked.give_back(tracked.own)
            tracked.num_calls += 1
