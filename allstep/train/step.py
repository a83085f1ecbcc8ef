"""One optimizer step on one global batch: the file to read first."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, compress
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.comm import CompletedWork, Work
from allstep.exchange import Exchange
from allstep.nn import Pipeline
from allstep.optim.checks import NonfiniteGradientError, find_nonfinite
from allstep.torch_classes import local_part
from allstep.train.batch import Batch
from allstep.train.noise import NoiseProbe
from allstep.train.precision import Precision
from allstep.train.task import Task


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step that has been made.

    Attributes:
        loss: this worker's part of the mean loss, for `Training.mean_loss`: a scalar, or digits
            [2, digits] of the loss (or of its sum over tokens) and of its weight, whose sums over
            workers and steps do not depend on the order.
        epoch: whole passes over the data before the step.
        num_samples: samples of all workers together.
        data_wait_s, exchange_s: seconds that this worker waited for data and for the exchange.
        is_logged: whether to log it, whatever the step's number.
    """

    loss: Tensor
    epoch: int
    num_samples: int
    data_wait_s: float = 0.0
    exchange_s: float = 0.0
    is_logged: bool = False


class TrainStep:
    """Trains on one global batch, with the same update on any number of workers.

    Each worker runs its micro-batches; `batch.backward` weighs their gradients by samples
    and exchanges them on the last, so that every worker then makes the same update.

    Args:
        task: provides the loss and the schedule.
        model: the module to call in the loss; may be the compiled form of the task's model.
        optimizer: over the task's model; its groups' learning rates are the base rates.
        precision: compute dtype and gradient scaler.
        exchange: the model's exchange; its policy says by how many steps gradients are late.
        noise: measures the gradients of some steps.
        clip_norm: largest L2 norm of the global gradient, or None.
        nonfinite: what to do with a gradient that is not finite: "raise", "skip" or "propagate".
        commit: takes the loss and starts the last message before the update, which waits for it;
            returns a Work whose result is logged in place of the loss.

    Attributes:
        num_skipped: number of steps that were left out.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        exchange: Exchange,
        noise: NoiseProbe,
        clip_norm: float | None = None,
        nonfinite: Literal["raise", "skip", "propagate"] = "raise",
        commit: Callable[[Tensor], Work[Tensor]] = CompletedWork,
    ) -> None:
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self._precision = precision
        self._exchange = exchange
        self._noise = noise
        self._clip_norm = clip_norm
        self._nonfinite = nonfinite
        self._commit = commit
        self.num_skipped = 0
        if nonfinite == "skip" or precision.scaler.is_enabled():
            exchange.statistics.leave_out_nonfinite()
        self._base_rates = [group["lr"] for group in optimizer.param_groups]
        self.first_data: object = None  # a whole micro-batch, for measuring its cost

    @property
    def scalars(self) -> dict[str, float]:
        """Scalars of the last step for the log: learning rate, skipped steps, trust ratios."""
        ratios = sorted(getattr(self._optimizer, "trust_ratios", dict)().values())
        found = {"learning_rate": float(self._optimizer.param_groups[0]["lr"])}
        if self.num_skipped:
            found["skipped_steps"] = self.num_skipped
        if ratios:
            found["trust_ratio/min"], found["trust_ratio/max"] = ratios[0], ratios[-1]
            found["trust_ratio/median"] = statistics.median(ratios)
        return found

    def begin_stage(self) -> None:
        """Drops the micro-batch that was kept; those of another stage are of another kind."""
        self.first_data = None

    def __call__(self, batch: Batch) -> Update:
        """Makes one update; none while the first stale gradients are still in flight.

        Args:
            batch: one item of `steps`.

        Returns:
            The update; its loss is float64 digits on the worker's device.
        """
        exposed_before_s = self._exchange.stats().exposed_s
        scaler = self._precision.scaler
        if isinstance(self._model, Pipeline) and self._model.num_workers > 1:
            with self._precision.autocast():  # includes the backward passes
                batch.run(self._model, self._precision.prepare_data, scaler=scaler)
            local_loss = batch.local_sums()
        else:
            for data in batch:
                self._add_gradient(batch, data)
            local_loss = batch.local_sums()
            if scaler.is_enabled():  # the scale is a power of two, so the division is exact
                local_loss[0] /= scaler.get_scale()
        self._noise.see_global(batch)
        committed = self._commit(local_loss)
        step = batch.step - self._exchange.policy.staleness
        is_finite = self._exchange.has_gradients and self._is_finite()
        loss = committed.wait()  # nothing is changed before
        if self._exchange.has_gradients:
            self._apply(step, is_finite=is_finite)
        return Update(
            loss=loss,
            epoch=batch.epoch,
            num_samples=batch.num_samples,
            data_wait_s=batch.data_wait_s,
            exchange_s=self._exchange.stats().exposed_s - exposed_before_s,
        )

    def update(self, step: int) -> None:
        """Applies the gradient in `p.grad`, with the learning rate of the step that computed it.

        Raises:
            NonfiniteGradientError: by policy, before anything is changed; on every worker alike.
        """
        self._apply(step, is_finite=self._is_finite())

    def _apply(self, step: int, *, is_finite: bool) -> None:
        """Does what `update` does, once it is known whether the gradient is finite."""
        if not is_finite and self._nonfinite == "raise":
            self._raise_nonfinite(step)
        self._set_learning_rate(self._task.schedule(step))
        if is_finite:
            self._precision.step(self._optimizer, self._exchange, self._clip_norm)
        else:
            self.num_skipped += 1
        self._optimizer.zero_grad(set_to_none=True)

    def _is_finite(self) -> bool:
        """Whether the global gradient is finite; True without a look if `nonfinite` needs none."""
        if self._nonfinite == "propagate" or self._precision.scaler.is_enabled():
            return True
        is_finite = not self._bad_gradients()
        for comm in self._exchange.workers_with_other_parts:
            is_finite = bool(comm.all_reduce(torch.tensor(float(is_finite)), "min"))
        return is_finite

    def _raise_nonfinite(self, step: int) -> NoReturn:
        bad = self._bad_gradients()
        for comm in self._exchange.workers_with_other_parts:
            bad = list(dict.fromkeys(chain.from_iterable(comm.all_gather_object(bad))))
        raise NonfiniteGradientError(bad, step)

    def _bad_gradients(self) -> list[str]:
        """The names of the parameters whose gradients on this worker are not finite."""
        named = getattr(self._model, "_orig_mod", self._model).named_parameters()
        gradients = {name: local_part(p.grad) for name, p in named if p.grad is not None}
        return list(compress(gradients, find_nonfinite(list(gradients.values()))))

    def _add_gradient(self, batch: Batch, data: object) -> None:
        """Adds one micro-batch's share to `p.grad`."""
        if self.first_data is None:
            self.first_data = data
        with self._precision.autocast():
            found = self._task.loss(self._model, self._precision.prepare_data(data))
        loss, weight = (found, None) if isinstance(found, Tensor) else found
        is_measured = self._noise.wants_micro_batch(batch)
        scaled = self._precision.scaler.scale(loss)
        batch.backward(scaled, weight=weight, exchange=not is_measured)
        if is_measured:
            self._noise.see_micro_batch(batch)

    def _set_learning_rate(self, multiplier: float) -> None:
        for group, base_rate in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base_rate * multiplier
