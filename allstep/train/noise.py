"""The gradient noise scale, measured while training."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.exchange import Exchange
from allstep.plan import NoiseScale
from allstep.train.batch import Batch
from allstep.train.precision import Precision

# The noise scale grows during a run. What a larger batch would do now is told by the last 100
# measurements or so; how many steps it would save in all, by the mean over the run.
_DECAY = 0.99


@dataclass(frozen=True)
class _Measurement:
    """One step's squared norms, float64; `micro` is 0 except on the worker of micro-batch 0."""

    micro_squared_norm: Tensor
    global_squared_norm: Tensor
    global_batch: int


class NoiseProbe:
    """Measures squared gradient norms every few steps and keeps the noise scale.

    [Note: noise at fixed micro-batches] The small batch is micro-batch 0 of the global batch,
    whichever worker has it, so that the estimate does not depend on the workers. That worker
    sends nothing during its backward pass, because `p.grad` may hold only its own gradient; then
    the step continues as usual. The norms stay on the device, and are summed over the workers
    together with the loss when it is logged (or before a checkpoint): no collective is added.

    Steps whose gradients are not finite, or that are no larger than a micro-batch, are left out.

    Args:
        exchange: the model's exchange.
        precision: the run's precision, for its gradient scaler.
        micro_batch: samples of micro-batch 0.
        every_steps: steps between two measurements; 0 to measure nothing.

    Attributes:
        micro_batch: as given; a later stage may have another.
        scale: the recent estimate, in samples; the same on every worker.
        mean_scale: the estimate over the whole stage, all measurements weighted equally.
    """

    def __init__(
        self,
        exchange: Exchange,
        precision: Precision,
        *,
        micro_batch: int,
        every_steps: int,
    ) -> None:
        self._exchange = exchange
        self._scaler = precision.scaler
        self.micro_batch = micro_batch
        self._every_steps = every_steps
        self._micro: Tensor | None = None
        self._pending: list[_Measurement] = []
        self.scale, self.mean_scale = NoiseScale(_DECAY), NoiseScale()

    def begin_stage(self, micro_batch: int) -> None:
        """Resets the estimates for a stage with other samples; call `flush` first."""
        self.micro_batch = micro_batch
        self.scale, self.mean_scale = NoiseScale(_DECAY), NoiseScale()

    def wants(self, batch: Batch) -> bool:
        """Whether this step is measured."""
        is_due = self._every_steps > 0 and batch.step % self._every_steps == 0
        return is_due and batch.num_samples > self.micro_batch

    def wants_micro_batch(self, batch: Batch) -> bool:
        """Whether the gradient of the current micro-batch is measured."""
        assert batch.micro_batch is not None
        return batch.micro_batch.index == 0 and self.wants(batch)

    def see_micro_batch(self, batch: Batch) -> None:
        """Measures the norm of `p.grad`, which holds only the current micro-batch's share."""
        norm = self._squared_norm(self._exchange.local_gradients().values())
        share = batch.gradient_share
        # Without a share it says nothing.
        self._micro = norm / share**2 if share else norm * math.nan

    def see_global(self, batch: Batch) -> None:
        """Measures the norm of the global gradient in `p.grad`, if the step is measured."""
        if not self.wants(batch):
            return
        whole = self._squared_norm(
            p.grad for p in self._exchange.trained.values() if p.grad is not None
        )
        micro = torch.zeros_like(whole) if self._micro is None else self._micro
        self._pending.append(_Measurement(micro, whole, batch.num_samples))
        self._micro = None

    def all_reduce(self, comm: Communicator, x: Tensor) -> Tensor:
        """Sums `x`, [n], over the workers, together with the pending measurements."""
        local = [measured.micro_squared_norm.to(x.device)[None] for measured in self._pending]
        summed = comm.all_reduce(torch.cat([x, *local]))
        total, micro = summed[: len(x)], summed[len(x) :]
        for squared_norm, measured in zip(micro, self._pending, strict=True):
            self._take_in(float(squared_norm), measured)
        self._pending = []
        return total

    def flush(self, comm: Communicator) -> None:
        """Adds the measurements made since the loss was last logged. All workers call it."""
        if self._pending:
            self.all_reduce(comm, torch.zeros(0, dtype=torch.float64))

    @property
    def scalars(self) -> dict[str, float]:
        """Scalars for the log."""
        value = self.scale.value
        return {} if value is None else {"noise_scale": value}

    @property
    def summary(self) -> str | None:
        """The result in words, for the user; None if nothing was measured."""
        return self.scale.summary(self.micro_batch) if self.scale.num_updates else None

    def state_dict(self) -> dict[str, Any]:
        """The estimates so far; call `flush` first."""
        return {"recent": self.scale.state_dict(), "mean": self.mean_scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        self.scale.load_state_dict(state["recent"])
        self.mean_scale.load_state_dict(state["mean"])

    def _take_in(self, micro_squared_norm: float, measured: _Measurement) -> None:
        global_squared_norm = float(measured.global_squared_norm)
        if not (math.isfinite(micro_squared_norm) and math.isfinite(global_squared_norm)):
            return
        for scale in (self.scale, self.mean_scale):
            scale.update(
                micro_squared_norm=micro_squared_norm,
                global_squared_norm=global_squared_norm,
                micro_batch=self.micro_batch,
                global_batch=measured.global_batch,
            )

    def _squared_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The squared norm, without the gradient scaler's factor."""
        norm = nn.utils.get_total_norm(gradients).double() / self._scaler.get_scale()
        return norm.square()
