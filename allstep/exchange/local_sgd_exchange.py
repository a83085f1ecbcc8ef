"""Local SGD as an exchange: parameters are averaged instead of gradients."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.exchange.local_sgd import ParameterAveraging
from allstep.exchange.overlapped import OverlappedExchange
from allstep.exchange.policy import LocalSGD


class LocalSGDExchange(OverlappedExchange):
    """Exchanges the gradients of the first global batches; then averages parameters."""

    policy: LocalSGD
    averaging: ParameterAveraging  # None until the model is taken up

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        policy: LocalSGD,
        scaler: torch.amp.GradScaler | None,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._optimizer = optimizer
        super().__init__(model, comm, policy, scaler)

    def _take_up(self) -> None:
        super()._take_up()
        algorithm = self._reducer.measured_algorithm_for
        self.averaging = ParameterAveraging(
            self.model, self.comm, self._optimizer, self.policy, algorithm=algorithm
        )

    @property
    def _stays_local(self) -> bool:
        return self.averaging.is_local(self.averaging.num_batches)

    @property
    def _is_in_round(self) -> bool:
        return not self.averaging.is_synchronized

    def note_update(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self._optimizer:
            raise UsageError(
                f"A {type(optimizer).__name__} that `attach` was not given updates the model:"
                " workers average their parameters after the step of the one that it was given"
                f" (`optimizer`, a {type(self._optimizer).__name__}), and would go on with"
                " different ones. Make one optimizer of all parameters, in groups."
            )
        super().note_update(optimizer)

    def _begin_global_batch(self, num_micro_batches: int, num_passes: int) -> None:
        self.averaging.average_if_due()  # where the optimizer's step was skipped
        super()._begin_global_batch(num_micro_batches, num_passes)

    def _reduce(self) -> Mapping[str, nn.Parameter]:
        summed, stays_local = self.trained, self._stays_local
        if stays_local:
            self.batch.take_own_for_all(summed.values(), self.comm.size)
        else:
            summed = super()._reduce()
        self.averaging.count_batch(was_exchanged=not stays_local)
        return summed

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "averaging": self.averaging.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if state["averaging"] is not None:
            self.averaging.load_state_dict(state["averaging"])

    def sync_buffers(self) -> None:
        self._refuse_detached("sync_buffers")
        self.averaging.flush()
        super().sync_buffers()

    def detach(self) -> None:
        super().detach()
        if self.averaging is not None:
            self.averaging.detach()

    def _warn_if_local(self) -> None:
        super()._warn_if_local()
        if self.averaging is not None:
            self.averaging.warn_if_local()
