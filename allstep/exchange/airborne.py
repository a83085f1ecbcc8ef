"""Flights between their sending and their landing, the oldest first."""

from collections import deque
from collections.abc import Iterator
from time import perf_counter

from torch.profiler import record_function

from allstep.comm import Communicator
from allstep.exchange.flight import Flight
from allstep.exchange.sender import Sender
from allstep.exchange.verdict import Verdict

__all__ = ["Airborne"]


class Airborne:
    """What has been sent and not been looked at: waits for it, and tells whether it is good.

    Args:
        sender: makes the flights, and has sent them.
        comm: the workers, for a verdict that is not good.

    Attributes:
        exposed_s: seconds in which landings had to wait, all together.
        last_wait_s: those of the last landing.
    """

    def __init__(self, sender: Sender, comm: Communicator) -> None:
        self._sender = sender
        self._comm = comm
        self._flights: deque[Flight] = deque()
        self._idle: list[Flight] = []  # landed ones, whose memory the next may use
        self._verdict: Verdict | None = None  # on the last that landed, if not looked at yet
        self.exposed_s = self.last_wait_s = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    def add(self, flight: Flight) -> None:
        """All its buckets have been sent."""
        self._flights.append(flight)

    def land(self) -> Flight:
        """The oldest flight, when its sums are there.

        Raises:
            AllstepError: on every worker if it failed on one. [Note: late verdict]
        """
        flight = self._flights.popleft()
        start_s = perf_counter()
        for index, job in enumerate(flight.jobs):
            with record_function(f"allstep::bucket {index} wait"):
                job.wait()
        self.last_wait_s = perf_counter() - start_s
        self.exposed_s += self.last_wait_s
        self._sender.lift_first_timeout()
        self.settle()
        self._verdict = Verdict.of(flight, compares=self._sender.compares)
        if not self._sender.looks_late or flight.failure is not None:
            self.settle()
        return flight

    def settle(self) -> None:
        """Raises on every worker if the last flight that landed was no good."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None:
            verdict.settle(self._comm)

    def wait(self) -> None:
        """Until the sums of all flights are there; none lands."""
        for flight in self._flights:
            for job in flight.jobs:
                job.wait()

    def clear(self) -> None:
        """Forgets the flights that have not landed."""
        self._flights.clear()

    def retire(self, flight: Flight) -> None:
        """A flight that has landed, and whose means nobody needs any more."""
        if flight.plan is self._sender.plan:
            self._idle.append(flight)

    def forget_memory(self) -> None:
        """Of flights of an earlier plan."""
        self._idle.clear()

    def next_flight(self) -> Flight:
        """An empty flight, in the memory of one that has landed if there is any."""
        flight = self._idle.pop() if self._idle else self._sender.new_flight()
        flight.clear()
        return flight
