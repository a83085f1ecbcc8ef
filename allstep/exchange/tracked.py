"""One batch norm module whose statistics are taken micro-batch by micro-batch."""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from allstep.exchange.hooks import Hook, Removable

__all__ = ["TrackedModule", "is_tracked"]


def is_tracked(module: nn.Module) -> TypeGuard[_NormBase]:
    """Whether the module keeps running statistics (and has got its shape)."""
    if not isinstance(module, _NormBase) or module.running_mean is None:
        return False
    return not nn.parameter.is_lazy(module.running_mean)


class TrackedModule:
    """Takes the statistics of a module's training forwards while `is_active`.

    During such a forward the module has scratch tensors for its running statistics and
    momentum 1, so that it leaves the statistics of exactly that call there. It never holds
    them at any other time, so that evaluating the module, or saving it, is always right.
    The hooks are traceable by torch.compile.

    Attributes:
        scratch: mean and variance of the last call.
        num_calls: calls in this micro-batch.
        sums: sums of share * statistics over this step's micro-batches.
        share: sum of their shares.
        weight: share of this worker's history in the running statistics.
        num_steps: steps since the last sync. num_uses: those that used the module here.
    """

    def __init__(self, module: _NormBase) -> None:
        self.module = module
        self.is_active = False
        self.num_calls = 0
        self.share = 0.0
        self.weight = 1.0
        self.num_steps = 0
        self.num_uses = 0
        self._own: tuple[Tensor | None, ...] | None = None
        self._own_momentum: float | None = None
        self._allocate()
        self._handles: list[Removable] = [
            module.register_forward_pre_hook(Hook(self.before_forward, self)),
            module.register_forward_hook(Hook(self._after_forward, self)),
        ]

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

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
        mean = self.scratch[0]
        if mean.device != self.running[0].device or mean.dtype != self.running[0].dtype:
            self._allocate()  # the model was moved
        self.num_calls, self.share = 0, 0.0

    def end_micro_batch(self) -> tuple[Tensor, Tensor]:
        """The statistics of this micro-batch: the mean over its calls."""
        num_calls, self.num_calls = self.num_calls, 0
        if num_calls == 1:
            return self.scratch
        for total, last in zip(self._earlier, self.scratch, strict=True):
            last.add_(total).div_(num_calls)
        torch._foreach_zero_(self._earlier)
        return self.scratch

    def give_back(self) -> None:
        """Undoes what a forward that raised has left."""
        if self._own is not None:
            self._swap_back()

    def _allocate(self) -> None:
        mean, var = self.running
        self.scratch = (torch.zeros_like(mean), torch.zeros_like(var))
        self.sums = (torch.zeros_like(mean), torch.zeros_like(var))
        self._earlier = (torch.zeros_like(mean), torch.zeros_like(var))
        self._counter = torch.zeros((), dtype=torch.long, device=mean.device)

    def before_forward(self, module: _NormBase, _: Any) -> None:
        """Lends the module scratch tensors for the statistics of one call."""
        if not (self.is_active and module.training and module.track_running_stats):
            return
        if self.num_calls:
            self._earlier[0].add_(self.scratch[0])
            self._earlier[1].add_(self.scratch[1])
        buffers = module._buffers
        self._own_momentum = module.momentum
        self._own = (
            buffers["running_mean"],
            buffers["running_var"],
            buffers["num_batches_tracked"],
        )
        buffers["running_mean"], buffers["running_var"] = self.scratch
        buffers["num_batches_tracked"] = self._counter
        module.momentum = 1.0

    def _after_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._own is not None:
            self._swap_back()
            self.num_calls += 1

    def _swap_back(self) -> None:
        assert self._own is not None
        buffers = self.module._buffers
        (
            buffers["running_mean"],
            buffers["running_var"],
            buffers["num_batches_tracked"],
        ) = self._own
        self.module.momentum = self._own_momentum
        self._own = None
