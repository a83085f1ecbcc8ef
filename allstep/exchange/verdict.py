"""What the workers' comparison in the tails of a flight has found.

[Note: late verdict] On the CPU a worker looks at the sums as soon as it has them, and stops
before it sends what others don't expect. On CUDA looking would make the host wait for the
device in every step. There the few numbers are copied behind the exchange, and the host reads
them when the next exchange starts, or anything else that all workers do together: by then they
have long arrived. So a disagreement comes to light one step late, on every worker at the same
point, and after one update that is not to be used. All buckets are sent in any case, for the
next collective would meet them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import DisagreementError, UsageError
from allstep.exchange.agreement import explain
from allstep.exchange.flight import Flight
from allstep.exchange.parameters import Signature
from allstep.exchange.tail import disagreeing_ranks

__all__ = ["Verdict", "looks_late"]


def looks_late(device: torch.device) -> bool:
    """Whether the host reads a verdict only when the next exchange starts."""
    return device.type == "cuda"


@dataclass(frozen=True)
class Verdict:
    """A landed flight's numbers on their way to the host, and what its worker came for.

    Attributes:
        numbers: the first bucket's check and the failure mark, on the CPU.
        event: when they are there; None if they are.
        num_check: how many of them are the check.
        action, described, failure: as of `Flight`.
    """

    numbers: Tensor
    event: torch.cuda.Event | None
    num_check: int
    action: str
    described: Signature
    failure: str | None

    @classmethod
    def of(cls, flight: Flight, *, compares: bool = True, marks: bool = True) -> "Verdict":
        """Starts the way to the host.

        Args:
            flight: one that has landed.
            compares: whether its first bucket compared the workers.
            marks: whether its last bucket has landed too.
        """
        plan, flats = flight.plan, flight.flats
        check = plan.check(flats) if compares else flats[0][:0]
        mark = plan.flags(flats)[:1] if marks else flats[0][:0]
        numbers = torch.cat([check, mark.to(flats[0])])
        event = None
        if numbers.is_cuda:
            on_host = torch.empty_like(numbers, device="cpu", pin_memory=True)
            on_host.copy_(numbers, non_blocking=True)
            numbers = on_host
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return cls(numbers, event, len(check), flight.action, flight.described, flight.failure)

    @property
    def is_good(self) -> bool:
        """Whether all workers came for the same thing and none failed; waits for the numbers."""
        if self.event is not None:
            self.event.synchronize()
        return not self.numbers.any()

    def settle(self, comm: Communicator) -> None:
        """Raises on every worker unless `is_good`. Collective if so.

        Raises:
            DisagreementError: naming who wants what.
            UsageError: on a worker that failed, where the others came for the same.
        """
        if self.is_good:
            return
        if disagreeing_ranks(self.numbers[: self.num_check]) or not self.failure:
            raise DisagreementError(explain(comm, self.failure or self.action, self.described))
        explain(comm, self.failure, self.described)
        raise UsageError(self.failure)
