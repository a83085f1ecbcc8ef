"""How fast a run goes, and what its steps wait for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Meter"]

_NUM_WARM_UP_STEPS = 2  # allocations, thread pools and first touches of the data


class Meter:
    """Adds up the seconds of training steps; evaluation and checkpoints don't count.

    The first steps are left out as soon as later ones exist.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._reset()

    def _reset(self) -> None:
        self.num_samples = 0
        self.step_s = 0.0
        self.data_wait_s = 0.0
        self.exchange_s = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times what runs inside as one step, the wait for its data included."""
        if self._num_steps == _NUM_WARM_UP_STEPS:
            self._reset()
        start_s = time.perf_counter()
        yield
        self.step_s += time.perf_counter() - start_s
        self._num_steps += 1

    def add(self, *, num_samples: int, data_wait_s: float, exchange_s: float) -> None:
        """Adds what one step handled and waited for; call it inside `step`."""
        self.num_samples += num_samples
        self.data_wait_s += data_wait_s
        self.exchange_s += exchange_s

    @property
    def samples_per_s(self) -> float:
        """Samples of all workers together per second of training."""
        return self.num_samples / self.step_s if self.step_s else 0.0

    @property
    def data_share(self) -> float:
        """Share of the steps' time that this worker waited for data."""
        return self.data_wait_s / self.step_s if self.step_s else 0.0

    @property
    def exchange_share(self) -> float:
        """Share of the steps' time that this worker waited for the exchange."""
        return self.exchange_s / self.step_s if self.step_s else 0.0
