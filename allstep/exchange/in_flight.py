"""Steps whose gradients are in flight, the oldest first."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Generic, TypeVar

from allstep.comm.work import Work
from allstep.exchange.runner import span

T = TypeVar("T")


class InFlight(Generic[T]):
    """A queue of steps, each with the Works that sum its gradients over the workers.

    [Note: stale timeline] With staleness k the exchange that step t starts ends in step t + k:

        step t:  p.grad = sum of the gradients of step t - k        for t >= k
                 p.grad = None                                      for t < k

    in addition to what `p.grad` held before; see `carry_over.CarryOver`.
    A step without `p.grad` makes no update: decay, moments and step counts don't change. T steps
    make T - k updates, and flushing the queue makes the other k. With staleness 0 each step waits
    for its own exchange. A parameter that is frozen, or removed from the model, gets no gradient
    from before that.

    Args:
        staleness: steps between the start of an exchange and the use of its gradients.
        wait: waits for a Work of a step.

    Attributes:
        exposed_s: seconds spent waiting for steps, in total.
        last_wait_s: seconds spent waiting for the last step.

    >>> steps = InFlight[str](staleness=1)
    >>> steps.push("first", [])
    >>> steps.pop_due()
    >>> steps.push("second", [])
    >>> steps.pop_due()
    'first'
    """

    def __init__(
        self,
        staleness: int,
        wait: Callable[[T, Work[Any]], None] = lambda step, work: work.wait(),
    ) -> None:
        self._staleness, self._wait_for = staleness, wait
        self._steps: deque[tuple[T, Sequence[Work[Any]]]] = deque()
        self.exposed_s = self.last_wait_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[T]:
        return (step for step, _ in self._steps)

    def push(self, step: T, works: Sequence[Work[Any]]) -> None:
        """Adds the newest step, whose Works have all been started."""
        self._steps.append((step, works))

    def pop_due(self) -> T | None:
        """Removes and returns the step whose gradients are due; None in the first steps."""
        return self.pop() if len(self._steps) > self._staleness else None

    def pop(self) -> T:
        """Removes and returns the oldest step, once its Works have ended; raises their errors."""
        step, works = self._steps.popleft()
        start_s = perf_counter()
        for index, work in enumerate(works):
            with span(f"allstep::bucket {index} wait"):
                self._wait_for(step, work)
        self.last_wait_s = perf_counter() - start_s
        self.exposed_s += self.last_wait_s
        return step

    def wait(self) -> None:
        """Waits for the Works of all steps, which stay in the queue."""
        for _, works in self._steps:
            for work in works:
                work.wait()

    def clear(self) -> None:
        """Drops all steps."""
        self._steps.clear()
