"""The numbers behind the gradients of one exchange, and what a worker reads from their sum."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.comm.agreement import digest
from allstep.comm.failures import wait_for_event
from allstep.device import Event, copy_to_host
from allstep.errors import DisagreementError, UsageError
from allstep.exchange.agreement import explain
from allstep.exchange.parameters import Signature
from allstep.exchange.piggyback import (
    disagreeing_ranks,
    refuse_mixed_weights,
    total_weight,
    write_check,
    write_note,
)
from allstep.exchange.state_sweep import StatePart
from allstep.exchange.stragglers import WorkerTimes
from allstep.exchange.weighing import Weighing


@dataclass
class Tail:
    """The numbers of an exchange besides gradients. [Note: agreement in the tail]

    Attributes:
        plan_digest: digest of the plan of the buckets.
        check: the comparison of the workers, in the first bucket.
        notes: the workers' notes, behind the comparison.
        mark: the mark of workers that have failed, in the last bucket.
        meeting: number of the exchange among all meetings of the workers.
        action: what this worker does, in words; must be the same on all.
        described: the tensors that it does it with, for the error.
        state: the part of the workers' models that is compared.
        failure: why this worker can't take part; the exchange then fails for all.
        weighing: the weights of this worker's losses.
    """

    plan_digest: int
    check: Tensor
    notes: Tensor
    mark: Tensor
    meeting: int = 0
    action: str = ""
    described: Signature = ()
    state: StatePart | None = None
    failure: str | None = None
    weighing: Weighing = field(default_factory=Weighing.of_means)

    def write_check(
        self,
        rank: int,
        action: str,
        described: Signature,
        described_digest: int,
        state: StatePart | None = None,
    ) -> None:
        """Compares plan, action and state with the other workers'."""
        self.action, self.described, self.state, self.failure = action, described, state, None
        updates = (state.num_updates, state.rates) if state else ()
        mine = digest((self.plan_digest, action, described_digest, updates))
        write_check(self.check, rank, mine, state.words if state else None)

    def write_note(self, rank: int, weighing: Weighing, times: WorkerTimes) -> None:
        """Writes the weights of this worker's losses, and the times of its last step."""
        self.weighing = weighing
        write_note(self.notes, rank, weighing, times)

    def write_mark(self, failure: str | None) -> None:
        """Writes the mark if this worker failed."""
        self.failure = failure
        self.mark.fill_(failure is not None)  # a number in one element would halt the host

    def total_weight(self, *, adds_up: bool) -> Tensor | None:
        """The sum of weights over the workers, after the exchange; None if losses were means.

        Args:
            adds_up: whether workers' values are summed at all.
        """
        return total_weight(self.notes if adds_up else self.notes[:0], self.weighing)

    def read(self, *, compares: bool = True, marks: bool = True) -> "AgreementResult":
        """Starts to copy the tail's sum to the host.

        Args:
            compares: whether the first bucket compared the workers.
            marks: whether the last bucket, with the mark, has been summed too.
        """
        check, notes = (self.check, self.notes) if compares else (self.check[:0], self.notes[:0])
        mark = (self.mark if marks else self.mark[:0]).to(check)
        numbers, event = copy_to_host(torch.cat((check, mark, notes)))
        num_compared = len(check) + len(mark)
        came_for = (self.action, self.described, self.failure, self.state)
        return AgreementResult(numbers, event, len(check), num_compared, *came_for)


@dataclass(frozen=True)
class AgreementResult:
    """The numbers of a comparison on their way to the host, and what this worker came for.

    Attributes:
        numbers: the summed check and failure mark, then the notes, on the CPU.
        event: when they are there; None if they are.
        num_check: how many of them are the check.
        num_compared: how many are the check and the mark.
        action: what this worker believed it did, in words.
        described: the tensors it did it with.
        failure: why this worker could not take part, if it could not.
        state: what it compared of its model.
    """

    numbers: Tensor
    event: Event | None
    num_check: int
    num_compared: int
    action: str
    described: Signature
    failure: str | None
    state: StatePart | None = None

    @property
    def notes(self) -> Tensor:
        """The workers' notes to each other, once `is_good`; empty if there are none."""
        return self.numbers[self.num_compared :]

    def is_good(self, comm: Communicator) -> bool:
        """Whether all workers came for the same thing and none failed; waits for the numbers.

        Raises:
            CollectiveTimeoutError: if they have not come in time; says who is missing.
        """
        if self.event is not None:
            wait_for_event(self.event, self.action, comm.wire.names, comm.timeout_s)
        return not self.numbers[: self.num_compared].any()

    def raise_if_bad(self, comm: Communicator) -> None:
        """Raises on every worker unless `is_good`. Collective if so.

        Raises:
            CollectiveTimeoutError: if the numbers have not come in time.
            DisagreementError: naming who wants what.
            UsageError: on a worker that failed, where the others came for the same; on all of
                them, where some weighed sums and others means.
        """
        if self.is_good(comm):
            refuse_mixed_weights(self.notes)
            return
        details = (*self.described, *(self.state.entries() if self.state else ()))
        words = explain(comm, self.failure or self.action, details)
        if disagreeing_ranks(self.numbers[: self.num_check]) or not self.failure:
            raise DisagreementError(words)
        raise UsageError(self.failure)
