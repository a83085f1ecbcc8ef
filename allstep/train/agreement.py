"""All workers stop after the same step, whichever of them was asked to."""

import torch
from torch import Tensor

from allstep.comm import Communicator, Work

__all__ = ["StopAgreement"]


class StopAgreement:
    """Tells every worker, one step late, that one of them was asked to stop.

    A signal reaches workers at different moments, and one that left its loop alone would
    leave the others waiting in a collective. So each step starts an all-reduce of the signal
    seen so far and reads the one that the step before started: no step ever waits for it.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._pending: Work[Tensor] | None = None

    def __call__(self, signal_number: int | None) -> int | None:
        """Says what this worker was asked; returns what all agreed on a step ago.

        Args:
            signal_number: the signal this worker has got, or None.

        Returns:
            The largest signal number that any worker had got at the last call, or None.
        """
        agreed = self.drain()
        flag = torch.tensor([signal_number or 0])
        self._pending = self._comm.all_reduce(flag, "max", async_op=True)
        return agreed

    def drain(self) -> int | None:
        """Finishes the all-reduce under way; call it when the steps end."""
        if self._pending is None:
            return None
        agreed = int(self._pending.wait().item())
        self._pending = None
        return agreed or None
