"""One rank's part of a parameter server."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.errors import CollectiveTimeoutError, CommunicationError


class ShardServer:
    """A shard of the parameters, which every gradient that arrives updates, one at a time.

    Args:
        parameters: of the shard.
        optimizer: of these.
        schedule, staleness_aware: as of `ParameterServer`.
        arrivals: whose turns are next, over and over; empty for whoever comes.
        timeout_s: how long a rank may wait for its turn.

    Attributes:
        staleness: staleness -> updates.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        staleness_aware: bool,
        arrivals: deque[int],
        timeout_s: float,
    ) -> None:
        self.parameters = parameters
        self.staleness: Counter[int] = Counter()
        self._optimizer, self._schedule = optimizer, schedule
        self._is_staleness_aware = staleness_aware
        self._num_updates = 0
        self._arrivals, self._timeout_s = arrivals, timeout_s
        self._is_interrupted = False
        self._changed = threading.Condition()

    def pull(self, rank: int) -> tuple[int, list[Tensor]]:
        """The number of updates so far, and the parameters."""
        with self._turn(rank):
            return self._num_updates, [p.detach().clone() for p in self.parameters]

    def push(self, rank: int, version: int, gradients: Sequence[Tensor | None]) -> None:
        """Applies a gradient of the parameters that had seen `version` updates."""
        with self._turn(rank):
            if not self.parameters:
                return
            for p, gradient in zip(self.parameters, gradients, strict=True):
                p.grad = gradient
            self._update(self._num_updates - version)
            self._optimizer.zero_grad(set_to_none=True)
            self.staleness[self._num_updates - version] += 1
            self._num_updates += 1

    def leave(self, rank: int) -> None:
        """Called after a rank's last request, so that no rank waits for its turn."""
        with self._changed:
            self._arrivals = deque(other for other in self._arrivals if other != rank)
            self._changed.notify_all()

    def interrupt(self) -> None:
        """Nobody's turn comes any more."""
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()

    def _update(self, staleness: int) -> None:
        scale = self._schedule(self._num_updates)
        if self._is_staleness_aware:
            scale /= max(1, staleness)
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * scale
        self._optimizer.step()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # a scheduler of the user's may read and set it

    @contextmanager
    def _turn(self, rank: int) -> Iterator[None]:
        """Lets one rank in at a time, in the order of `arrivals`."""

        def has_come() -> bool:
            is_due = not self._arrivals or self._arrivals[0] == rank
            return is_due or self._is_interrupted

        with self._changed:
            if not self._changed.wait_for(has_come, self._timeout_s):
                raise CollectiveTimeoutError(
                    f"A request of rank {rank} waited {self._timeout_s:g} s for one of rank"
                    f" {self._arrivals[0]}, which comes first in `arrivals`."
                )
            if self._is_interrupted:
                raise CommunicationError("The parameter server has failed.")
            yield
            self._arrivals.rotate(-1)
            self._changed.notify_all()
