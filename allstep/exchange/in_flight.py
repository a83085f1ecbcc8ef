"""Steps whose gradients are under way, the oldest first."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Generic, TypeVar

from allstep.comm.work import Work
from allstep.exchange.runner import span

T = TypeVar("T")


class InFlight(Generic[T]):
    """A queue of steps, each with the works that make its gradients the workers' sums.

    [Note: stale timeline] With staleness k the exchange that step t starts ends in step t + k:

        step t:  p.grad = sum of the gradients of step t - k        for t >= k
                 p.grad = None                                      for t < k

    on top of what `p.grad` held before; see `carry_over.CarryOver`.
    A step without `p.grad` makes no update, so that no decay, moment or step count moves; T
    steps make T - k updates, and flushing the queue the k others. Staleness 0 is the exchange
    that a step waits for. What is frozen meanwhile, or leaves the model, gets no gradient that was
    made before.

    Args:
        staleness: steps between the start of an exchange and the use of its gradients.
        wait: waits for a work of a step.

    Attributes:
        exposed_s: seconds for which steps had to be waited for, all together.
        last_wait_s: those of the last one.

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
        """Adds the newest step, all of whose works have been started."""
        self._steps.append((step, works))

    def pop_due(self) -> T | None:
        """The step whose gradients are to be used now; None in the first steps."""
        return self.pop() if len(self._steps) > self._staleness else None

    def pop(self) -> T:
        """The oldest step, once its works have ended; raises what they raised."""
        step, works = self._steps.popleft()
        start_s = perf_counter()
        for index, work in enumerate(works):
            with span(f"allstep::bucket {index} wait"):
                self._wait_for(step, work)
        self.last_wait_s = perf_counter() - start_s
        self.exposed_s += self.last_wait_s
        return step

    def wait(self) -> None:
        """Waits for the works of all steps, which stay in the queue."""
        for _, works in self._steps:
            for work in works:
                work.wait()

    def clear(self) -> None:
        """Forgets all steps."""
        self._steps.clear()
