"""A schedule in the form of torch's learning-rate schedulers."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from allstep.optim.schedules import Schedule, check_schedule

__all__ = ["ScheduledLR"]


class ScheduledLR(LRScheduler):
    """Sets every group's rate to its first rate times `schedule(step)`.

    Call `step()` once after each `optimizer.step()`. The schedule itself is not part of the
    state dict: build it again as it was.

    Args:
        optimizer: any of torch's.
        schedule: a pure function from the step, which counts from 0, to a multiplier.
        last_epoch: the last step made; -1 begins anew.

    Raises:
        UsageError: if `schedule` is no function.

    >>> import torch
    >>> from allstep.optim import cosine
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> scheduler = ScheduledLR(optimizer, cosine(4))
    >>> rates = []
    >>> for _ in range(4):
    ...     rates.append(round(scheduler.get_last_lr()[0], 3))
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates
    [0.5, 0.427, 0.25, 0.073]
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, last_epoch: int = -1) -> None:
        check_schedule(schedule)
        self.schedule = schedule
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the present step, by group."""
        multiplier = self.schedule(self.last_epoch)
        return [base_lr * multiplier for base_lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs; the schedule is left out."""
        state: dict[str, Any] = super().state_dict()
        del state["schedule"]
        return state
