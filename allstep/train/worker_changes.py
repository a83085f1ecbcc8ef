"""Changes of the workers in a user's own loop: how far each one is, and which state others get.

[Note: elastic loops] As in [Note: elastic training], each worker is either before a step's update
or behind it. But here the update is the user's code, which allstep can't run in a worker's place,
and code between two calls of allstep can't be run again. So a worker of a loop is in one of three
places of a step:

- at its start: before the user gets the global batch;
- in the loop over its micro-batches. If a worker is lost, what a step touches before its update
  (buffers, gradients, the grid, the position in the data) is restored, and the loop over the batch
  begins again, with this worker's micro-batches among the remaining workers;
- in the last message before the update, with all sums. If any other worker has received that
  message, all sums were complete: this worker makes its update as if nothing had happened, and
  meets the others afterwards. If nobody has, the loop over the batch begins again.

In the user's code a lost worker is noticed in `batch.backward`: it returns, and the loop over the
batch continues with the first micro-batch. A function given to `Elastic.call` is repeated in the
same way. Workers may join only at the start of a step, where all the others are, or will be after
their update: from there on they run the same code.
"""

import logging
from collections.abc import Callable, Mapping

from allstep.comm import Communicator
from allstep.comm.agreement import agree
from allstep.comm.membership import Membership, regroup
from allstep.errors import CheckpointError, DisagreementError, PeerLostError, UsageError
from allstep.train.checkpoint import receive_state, send_state
from allstep.train.elastic import LOST, StepCommit, admit, tell_who_goes_on
from allstep.train.loop_state import LoopState
from allstep.train.stop import StepStopAgreement

PLACES = 1 << 20  # most places in a step: its start, its batch, its last message, then calls


class WorkerChanges:
    """A worker's place in the loop, and its passage to the next generation of workers.

    Args:
        comm: the workers.
        membership: this worker's membership.
        state: the loop's state.
        stop: the agreement by which the workers decide to stop.

    Attributes:
        step, place: where the worker is; None before it has begun or joined.
        is_committing: whether it waits for the last message of what it has done there.
        has_changed: whether exchanges and loader don't know yet that the workers have changed.
    """

    def __init__(
        self,
        comm: Communicator,
        membership: Membership,
        state: LoopState,
        stop: StepStopAgreement,
    ) -> None:
        self._comm, self._membership, self._state = comm, membership, state
        self.messages = StepCommit(comm, membership, stop)
        self.step: int | None = None
        self.place = 0
        self.is_committing = self.has_changed = False
        self._position = state.position()
        self._last: tuple[str, str] | None = None  # name and text of what was committed last

    @property
    def joins(self) -> bool:
        """Whether this worker joins others that have begun."""
        return self._membership.waits

    def begin(self, training: Mapping[str, object]) -> bool:
        """Meets the first workers, or joins the present ones. Collective.

        Args:
            training: everything that workers must have in common to train together.

        Returns:
            Whether this worker joins.

        Raises:
            UsageError: if `training` differs from the others'.
            PeerLostError: if no worker is left to join.
        """
        admit(self._comm, self._membership, training)
        joins = self.joins
        if joins:
            self.change()
            self.be_ready()
        self.step = self._state.loader.step
        return joins

    def end(self, code: int) -> None:
        """Ends the training, when all workers have finished. Collective.

        Args:
            code: exit code of the launcher if all its own workers were lost.
        """
        while not self._all_have_met():
            try:
                self.change()
            except PeerLostError:  # too few workers, as the others have ended by now
                if not self._membership.is_over:
                    raise
                break
        self._membership.end(code)

    def _all_have_met(self) -> bool:
        """Whether all have reached the end; for some the training may be over already."""
        try:
            self.take_up()
            agree(self._comm, "end the loop over epochs")
        except LOST:
            return self._membership.is_over
        return True

    def leave(self) -> None:
        """Leaves the training; the others continue."""
        self._membership.leave()

    def enter(self, step: int | None, place: int, *, is_committing: bool = False) -> None:
        """Records that the worker enters a place of a step; all workers pass the same places."""
        self.step, self.place, self.is_committing = step, place, is_committing

    def note_position(self) -> None:
        """Saves the position, before any part of the step has begun."""
        self._position = self._state.position()

    def call(self, function: Callable[[], str]) -> str:
        """Calls, after a step, a function that communicates, until no worker is lost meanwhile.

        Returns:
            The function's result, on this worker or on another that received the last message.

        Raises:
            PeerLostError: as in `change`.
        """
        text, step, place = None, self.step, self.place + 1
        self.note_position()
        while text is None:
            self.enter(step, place)
            try:
                self.take_up()
                found = function()
                self.enter(step, place + 1, is_committing=True)
                self._comm.barrier()
                self.note_committed(found)
                text = found
            except LOST:
                text = self.text_of_others()
        return text

    def note_committed(self, text: str) -> None:
        """Records the result of this place's last message, for a worker that missed it."""
        self._last = self._name, text

    def text_of_others(self) -> str | None:
        """Continues with the remaining workers; returns what was committed, if any received it."""
        was_committing, progress, name = self.is_committing, self._progress, self._name
        newest = self.change()
        if not (was_committing and newest > progress):
            return None
        return self._membership.read(name)

    def change(self) -> int:
        """Forms the next generation; returns how far its most advanced worker is. Collective.

        Raises:
            PeerLostError: if too few workers are left, none has the state, or the launcher ended.
        """
        self._comm.abort()
        if not self.is_committing:  # otherwise the user may still make an update
            for exchange in self._state.exchanges:
                exchange.detach()
        if self._last is not None:
            self._membership.publish(*self._last)
        regroup(self._comm, self._membership, self._progress)
        self.messages = StepCommit(self._comm, self._membership, self.messages.stop)
        self.has_changed = True
        newest = max(member.progress for member in self._membership.members)
        if newest < 0:
            raise PeerLostError(
                "All workers that had the training's state were lost before this one had joined."
            )
        tell_who_goes_on(self._comm, newest // PLACES)
        return newest

    def be_ready(self) -> None:
        """Applies a change of workers, and the next one if another worker is lost meanwhile."""
        while self.has_changed:
            try:
                self.take_up()
            except LOST:
                self.change()

    def take_up(self) -> None:
        """Sends the state to workers without one, and updates exchanges and loader. Collective.

        No worker continues before all have the state: otherwise the remaining ones might no longer
        have the state from the start of a step.
        """
        if not self.has_changed:
            return
        is_new, has_new = self.step is None, any(m.progress < 0 for m in self._membership.members)
        if has_new:
            self._share_state()
        self._state.loader.begin_again(self._position["loader"])
        try:
            for exchange, stored in zip(
                self._state.exchanges, self._position["exchanges"], strict=True
            ):
                exchange.begin_again(stored)
        except DisagreementError as error:
            if not has_new or (is_new and not error.matches_rank_0):
                raise
            if self._comm.rank == 0:
                logging.getLogger("allstep").info(f"goes on without who joined: {error}")
            raise PeerLostError("Who joined has something else, and goes.") from error
        if is_new:
            self.step = self._state.loader.step
        self._comm.barrier()
        self.has_changed = False

    def _share_state(self) -> None:
        if self._comm.rank == 0:
            send_state(self._comm, {**self._state.state_dict(), **self._position})
            return
        state = receive_state(self._comm)
        if self.step is None:
            self._position = {name: state.pop(name) for name in self._position}
            try:
                self._state.load_state_dict(state)
            except CheckpointError as error:
                raise UsageError(
                    "This worker can't join: what the others have, which it reads as it would a"
                    f" checkpoint, doesn't fit. {error}"
                ) from error

    @property
    def _progress(self) -> int:
        return -1 if self.step is None else PLACES * self.step + self.place

    @property
    def _name(self) -> str:
        """The name of what is committed at this place."""
        return f"committed/{self.step}/{self.place}"
