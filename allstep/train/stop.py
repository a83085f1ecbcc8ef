"""Stopping a run: signals become requests, and all workers stop after the same step.

The message by which they agree also carries requests for a checkpoint when one is due by a clock.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor

from allstep.comm import Communicator, Work

SIGNALS = (signal.SIGINT, signal.SIGTERM)

# A terminal, a launcher and a scheduler may each deliver the same request; only a repeat
# that comes later than this is somebody who doesn't want to wait.
REPEAT_S = 2.0


class Interrupts:
    """While entered, SIGINT and SIGTERM set `requested` instead of ending the process.

    A repeat within `REPEAT_S` is ignored; a later one is passed to the previous handler, so that a
    second Ctrl-C ends the process at once. Outside of the main thread, where Python allows no
    handlers, nothing is installed and `requested` stays None.

    Args:
        clock: returns the time in seconds.

    Attributes:
        requested: the first signal that came, or None.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested: signal.Signals | None = None
        self._clock = clock
        self._requested_at_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def request(self, number: int) -> None:
        """Sets `requested` as a signal does, for a request that comes by a message.

        Args:
            number: the signal's number.
        """
        if self.requested is None:
            self.requested = signal.Signals(number)
            self._requested_at_s = self._clock()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.request(number)
        elif self._clock() - self._requested_at_s > REPEAT_S:
            self._insist(signal.Signals(number), frame)

    def _insist(self, number: signal.Signals, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class StopAgreement:
    """Tells every worker, one step late, that one of them was asked to stop.

    A signal reaches workers at different moments, and one that left its loop first would
    leave the others waiting in a collective. So each step starts an all-reduce of the signal
    seen so far and reads the one that the step before started: no step ever waits for it.

    Attributes:
        is_save_due: whether a worker requested a checkpoint in the message that was read last.
    """

    def __init__(self, comm: Communicator) -> None:
        self.is_save_due = False
        self._comm = comm
        self._pending: Work[Tensor] | None = None

    def __call__(self, signal_number: int | None, *, is_save_due: bool = False) -> int | None:
        """Sends this worker's requests; returns what all agreed on one step ago.

        Args:
            signal_number: the signal this worker has got, or None.
            is_save_due: whether this worker asks for a checkpoint.

        Returns:
            The largest signal number that any worker had got at the last call, or None.
        """
        agreed = self.drain()
        flags = torch.tensor([signal_number or 0, int(is_save_due)])
        self._pending = self._comm.all_reduce(flags, "max", async_op=True)
        return agreed

    def drain(self) -> int | None:
        """Finishes the pending all-reduce; call it when the steps end."""
        self.is_save_due = False
        if self._pending is None:
            return None
        agreed, is_save_due = self._pending.wait().tolist()
        self._pending, self.is_save_due = None, bool(is_save_due)
        return agreed or None


class StepStopAgreement:
    """As `StopAgreement`, without the delay, in a message that each step sends anyway.

    Args:
        interrupts: reports this worker's signals.

    Attributes:
        interrupts: as given.
        is_save_due: as in `StopAgreement`.
        agreed: all workers' requests in the last message, until `drain` reads them.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self.is_save_due = False
        self.interrupts = interrupts
        self._asks_to_save = False
        self.agreed = torch.zeros(len(SIGNALS) + 1)

    @property
    def asked(self) -> Tensor:
        """This worker's requests, to be summed over the workers."""
        requested = self.interrupts.requested
        return torch.tensor([*(requested == number for number in SIGNALS), self._asks_to_save])

    def note(self, agreed: Tensor) -> None:
        """Records the sum of all workers' requests."""
        self.agreed = agreed

    def __call__(self, signal_number: int | None, *, is_save_due: bool = False) -> int | None:
        """Notes whether to ask for a checkpoint; returns a signal that a worker had got."""
        agreed = self.drain()
        self._asks_to_save = is_save_due
        return agreed

    def drain(self) -> int | None:
        """The requests of the last message, once."""
        *by_signal, self.is_save_due = self.agreed.bool().tolist()
        self.agreed = torch.zeros_like(self.agreed)
        asked = (n for n, is_asked in zip(SIGNALS, by_signal, strict=True) if is_asked)
        return max(asked, default=None)
