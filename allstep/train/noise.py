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
    """One step's squared norms, in float64; `micro` is 0 but on the worker of micro-batch 0."""

    micro_squared_norm: Tensor
    global_squared_norm: Tensor
    global_batch: int


class NoiseProbe:
    """Measures squared gradient norms every few steps and keeps the noise scale.

    [Note: noise at fixed micro-batches] The small batch is micro-batch 0 of the global batch,
    whichever worker has it, so that the estimate does not depend on the workers. That worker
    sends nothing during its backward pass, for only its own gradient may be in `p.grad`; then the
    step goes on as ever. The norms stay on the device, and are summed over the workers together
    with the loss when that is logged (or before a checkpoint): no collective is added.

    Steps whose gradients are not finite, or that are no larger than a micro-batch, are left out.

    Args:
        exchange: of the model.
        precision: for its gradient scaler.
        micro_batch: samples of micro-batch 0.
        every_steps: steps between two measurements; 0 for none at all.

    Attributes:
        micro_batch: as given; a later stage may have another.
        scale: the recent estimate; the same on every worker.
        mean_scale: over the whole stage, all measurements alike.
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
        """Forgets what other samples were like; call `flush` first."""
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
        """Takes the norm of the gradient, which is only the current micro-batch's share."""
        norm = self._squared_norm(self._exchange.local_gradients().values())
        share = batch.gradient_share
        self._micro = (
            norm / share**2 if share else norm * math.nan
        )  # without weight it says nothing

    def see_global(self, batch: Batch) -> None:
        """Takes the norm of `p.grad`, which holds the global gradient, if the step is measured."""
        if not self.wants(batch):
            return
        whole = self._squared_norm(
            p.grad for p in self._exchange.trained.values() if p.grad is not None
        )
        micro = torch.zeros_like(whole) if self._micro is None else self._micro
        self._pending.append(_Measurement(micro, whole, batch.num_samples))
        self._micro = None

    def all_reduce(self, comm: Communicator, x: Tensor) -> Tensor:
        """The sum of `x`, [n], over the workers, and of what was measured along with it."""
        local = [measured.micro_squared_norm.to(x.device)[None] for measured in self._pending]
        summed = comm.all_reduce(torch.cat([x, *local]))
        total, micro = summed[: len(x)], summed[len(x) :]
        for squared_norm, measured in zip(micro, self._pending, strict=True):
            self._take_in(float(squared_norm), measured)
        self._pending = []
        return total

    def flush(self, comm: Communicator) -> None:
        """Takes in what was measured since the loss was logged. All workers call it."""
        if self._pending:
            self.all_reduce(comm, torch.zeros(0, dtype=torch.float64))

    @property
    def scalars(self) -> dict[str, float]:
        """What to log."""
        value = self.scale.value
        return {} if value is None else {"noise_scale": value}

    @property
    def summary(self) -> str | None:
        """What the run found out, in the user's terms; None if nothing was measured."""
        return self.scale.summary(self.micro_batch) if self.scale.num_updates else None

    def state_dict(self) -> dict[str, Any]:
        """The estimates so far; call `flush` first."""
        return {"recent": self.scale.state_dict(), "mean": self.mean_scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with what `state_dict` gave."""
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
        """Without the gradient scaler's factor."""
        norm = nn.utils.get_total_norm(gradients).double() / self._scaler.get_scale()
        return norm.square()
