"""Reads the workers' comparison, which is sent in the first bucket."""

from collections.abc import Sequence
from typing import Any

from allstep.comm import Communicator, Work
from allstep.exchange.parameters import Signature
from allstep.exchange.piggyback import times_in
from allstep.exchange.reducer import Bucket, Reducer, Then
from allstep.exchange.state_sweep import StatePart
from allstep.exchange.stragglers import Stragglers
from allstep.exchange.tail import AgreementResult, Tail


class BucketComparison:
    """Raises on every worker if their buckets belong to different exchanges.

    Args:
        comm: the workers.
        reducer: sums the buckets.
        staleness: steps between the start of an exchange and the use of its gradients.
        stragglers: receives the workers' times, which are sent with the comparison.
        is_read_late: whether the host reads it a step late. [Note: late reading]
    """

    def __init__(
        self,
        comm: Communicator,
        reducer: Reducer,
        staleness: int,
        stragglers: Stragglers,
        *,
        is_read_late: bool,
    ) -> None:
        self._comm, self._reducer, self._staleness = comm, reducer, staleness
        self._stragglers, self._is_read_late = stragglers, is_read_late
        self._result: AgreementResult | None = None  # of the last sums, if not looked at yet

    def write(
        self,
        tail: Tail,
        action: str,
        described: Signature,
        described_digest: int,
        state: StatePart | None = None,
    ) -> Then | None:
        """Writes this worker's part of the comparison; see `Tail.write_check`.

        Returns:
            A function that reads the comparison as soon as it is summed, unless it is read late.
            This happens before the other buckets are sent: a worker that disagrees sends none.
        """
        tail.meeting = self._comm.announced.begin_exchange()
        tail.write_check(self._comm.rank, action, described, described_digest, state)
        if self._is_read_late or not self._reducer.adds_up:
            return None
        # The reducer's own group may be busy with buckets that are left to the backend.
        comm = self._comm if self._reducer.is_left_to_backend else self._reducer.comm

        def compare(error: BaseException | None) -> None:
            if error is None:
                tail.read(marks=False).raise_if_bad(comm)

        return compare

    def wait_for(self, tail: Tail, work: Work[Any]) -> None:
        """Waits for a sum, but not for a worker that waits elsewhere. [Note: announced calls]"""
        announced, abort = self._comm.announced, self._comm.abort
        announced.wait(work, tail.meeting, tail.action, abort)

    def receive(self, tail: Tail, *, now: bool) -> None:
        """Called when an exchange's sums have arrived.

        Args:
            tail: the tail behind the sums.
            now: whether to read it at once, even if `is_read_late`.
        """
        self.raise_if_bad()
        self._result = tail.read(compares=self._reducer.adds_up)
        if now or not self._is_read_late or tail.failure is not None:
            self.raise_if_bad()

    def raise_if_bad(self) -> None:
        """Raises on every worker if the last sums that were received are not valid."""
        result, self._result = self._result, None
        if result is not None:
            result.raise_if_bad(self._comm)
            self._stragglers.note(times_in(result.notes), self._comm)

    def agree(
        self,
        buckets: Sequence[Bucket],
        tail: Tail,
        action: str,
        described: Signature,
        described_digest: int,
    ) -> None:
        """Sends a first bucket with a comparison, but without gradients.

        So workers that do something else find out, instead of waiting elsewhere.
        """
        first = buckets[0]
        kept = first.flat.clone()
        first.flat.zero_()
        then = self.write(tail, action, described, described_digest)
        state = self._reducer.copied_state(first.layout)
        self.wait_for(tail, self._reducer.start(first, state=state, then=then))
        if self._is_read_late and self._reducer.adds_up:
            self._read_now(buckets, tail)
        first.flat.copy_(kept)

    def _read_now(self, buckets: Sequence[Bucket], tail: Tail) -> None:
        """Raises if workers disagree, after taking part in what others send before they read it."""
        result = tail.read(marks=False)
        if not result.is_good(self._comm):
            for bucket in [*buckets[1:], *self._staleness * list(buckets)]:
                bucket.flat.zero_()
                self._reducer.start(bucket)
        result.raise_if_bad(self._comm)
