"""A user's own loop over `steps` that continues when workers are lost or join."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from enum import Enum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from allstep.comm.membership import Membership
from allstep.comm.system import System
from allstep.data import GlobalBatch, MapLoader
from allstep.data.batches import GlobalBatchLoader
from allstep.data.random import derive_seed, preserved_random_state, seed_all
from allstep.env import Launch, read_launch
from allstep.errors import UsageError, check_integer
from allstep.exchange import Exchange
from allstep.train.checkpoint import Stateful
from allstep.train.elastic import check_loop, parameters_of
from allstep.train.loop_state import BeforeStep, LoopState, refuse_second_loop
from allstep.train.saver import Saver
from allstep.train.stop import Interrupts, StepStopAgreement
from allstep.train.worker_changes import PLACES, WorkerChanges


class _Place(Enum):
    """Where in an epoch's body a worker is."""

    BEFORE_STEPS = 0
    IN_BATCH = 1  # from when the user gets the batch until all workers have its sums
    BEHIND_BATCH = 2
    BEHIND_STEPS = 3


class Elastic:
    """Lets a loop over `steps` continue when workers are lost, and when new ones join.

    While entered, nobody waits for a worker that has ended: the others run the interrupted step
    again as a whole, among themselves, and each sample counts once. A worker that joins gets the
    models, `state` and the position in the data from another worker when it enters. The result has
    the bits of an undisturbed single worker. All workers run the same script, started by
    `allstep launch --elastic`; a single process may use it, too. See [Note: elastic loops].

    Code inside the loop over a batch may run again, for other micro-batches; `batch.attempt` counts
    the repetitions. Code outside of it must not communicate with other workers, except by
    `batch.global_loss()` and `Elastic.call`.

    With `run_dir` it also does what `AutoCheckpoint` does: started again, the training continues
    from its newest checkpoint, and SIGINT or SIGTERM ends the loop with a checkpoint after the
    current step or the next, on all workers after the same one. Only rank 0 touches the disk; if it
    is lost before it has written, the next rank 0 writes the checkpoint.

    Args:
        loader: from `allstep.data.loader`, of a map-style data set.
        exchanges: from `allstep.attach`, with `Synchronous(compression="exact")`; the same that
            `steps` is given.
        state: name -> object with `state_dict` and `load_state_dict` that the next step also
            depends on: optimizers, learning-rate schedulers, a GradScaler.
        run_dir: the checkpoints' folder; made if missing. With None nothing is saved, and signals
            are left to the script.
        every_steps, every_s, keep, clock: as in `AutoCheckpoint`.
        membership: this worker's, from `loop_membership`; None to ask the launcher for one.

    Raises:
        UsageError: if an argument is of a wrong kind, if a worker holds state that would be lost
            with it, if the process group belongs to another library and uses accelerators, or if
            the launcher ends all workers when one fails.

    Example:
        >>> import torch, allstep
        >>> from torch.utils.data import TensorDataset
        >>> comm = allstep.init(device="cpu")
        >>> model = torch.nn.Linear(3, 1)
        >>> exchange = allstep.attach(model, comm, allstep.Synchronous(compression="exact"))
        >>> samples = TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
        >>> loader = allstep.data.loader(samples, comm, global_batch=4, micro_batch=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with allstep.Elastic(loader, exchange, state={"optimizer": optimizer}) as elastic:
        ...     for epoch in elastic.epochs(2):
        ...         for batch in allstep.steps(loader, exchange, elastic=elastic):
        ...             for x, y in batch:
        ...                 batch.backward(torch.nn.functional.mse_loss(model(x), y))
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> loader.step
        6
    """

    def __init__(
        self,
        loader: GlobalBatchLoader,
        *exchanges: Exchange,
        state: Mapping[str, Stateful],
        run_dir: Path | str | None = None,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        clock: Callable[[], float] = time.monotonic,
        membership: Membership | None = None,
    ) -> None:
        self._state = LoopState(loader, exchanges, state)
        check_loop(loader, exchanges)
        self._loader, self._exchanges, comm = loader, exchanges, exchanges[0].comm
        self._keeps_checkpoints = run_dir is not None
        self._interrupts = Interrupts()
        self._stop = StepStopAgreement(self._interrupts)
        self._saver = Saver(
            self,
            comm,
            None if run_dir is None else Path(run_dir).absolute(),
            self._interrupts,
            every_steps=every_steps,
            every_s=every_s,
            keep=keep,
            clock=clock,
            agreement=self._stop,
        )
        self._changes: WorkerChanges | None = None
        launch = read_launch()
        if membership is None and (launch.launcher != "none" or comm.size > 1):
            membership = loop_membership(launch, comm.timeout_s)
        if membership is not None:
            self._changes = WorkerChanges(comm, membership, self._state, self._stop)
        self._entered: ExitStack | None = None
        self._num_epochs: int | None = None  # in `epochs`
        self._place = _Place.BEFORE_STEPS
        self._epoch = 0  # the present one
        self._was_over = False  # all its steps were made before the state that was loaded
        self._awaits_update: list[bool] = []  # between two steps: whether gradients are not used
        self._num_calls = 0  # in this step, or behind an epoch's last
        self._before: list[BeforeStep] = []

    @property
    def interrupted(self) -> int | None:
        """Number of the signal by which the workers agreed to stop, or None."""
        return self._saver.interrupted

    def __enter__(self) -> Self:
        if self._entered is not None:
            raise UsageError("An Elastic is entered once; make another one.")
        changes = self._changes
        with ExitStack() as stack:
            if self._keeps_checkpoints and (changes is None or not changes.joins):
                stack.enter_context(self._saver.hold_for_loop())
            self._entered = stack
            if changes is not None and changes.begin(self._training()):
                self._was_over = False  # as who joins begins with a step
            elif changes is not None and self._was_over:
                changes.enter(self._loader.step - 1, 2)  # behind the last one's update
            if self._keeps_checkpoints:
                stack.enter_context(self._interrupts)
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._entered is not None
        self._entered.push(self._leave)
        self._entered.__exit__(error_type, error, trace)

    def _leave(self, error_type: type[BaseException] | None, *_: object) -> None:
        changes, step = self._changes, self._loader.step
        if changes is None:
            return
        if error_type is not None:
            changes.leave()
            return
        changes.enter(step, changes.place + 1 if changes.step == step else 1)
        changes.note_position()
        changes.end(128 + self.interrupted if self.interrupted else 0)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The remaining epochs; a worker that joins begins with the others' present epoch.

        If checkpoints are kept, no epoch follows a signal.

        Each epoch holds one loop over `steps`; if this loop is left early, the next one continues
        the same epoch. A worker that joins in the middle of an epoch also runs the code before that
        loop.

        Args:
            num_epochs: epochs of the whole training.

        Yields:
            The epoch's number, counted from 0.

        Raises:
            UsageError: outside of `with`, or if `num_epochs` is not positive.
        """
        check_integer("num_epochs", num_epochs)
        if self._entered is None:
            raise UsageError("`epochs` is for `with Elastic(…) as elastic:`.")
        self._num_epochs = num_epochs
        return self._epochs(num_epochs)

    def _epochs(self, num_epochs: int) -> Iterator[int]:
        device = self._state.comm.device
        with preserved_random_state(device), self._state.kept_by("elastic"):
            while self.interrupted is None:
                epoch = self._loader.epoch - self._was_over
                if epoch >= num_epochs:
                    break
                self._move(_Place.BEFORE_STEPS)
                self._epoch = epoch
                self._state.seed_epoch(epoch)
                yield epoch
                self._was_over = False
                self._move(_Place.BEHIND_STEPS)
                is_last = epoch + 1 == num_epochs
                if self.interrupted is None and (self._saver.drain() or is_last):
                    # So that only the last one's end is run again, without the steps before it.
                    self._save(replace=not is_last)
        self._move(_Place.BEHIND_STEPS)

    def _move(self, place: _Place) -> None:
        """Enters a place around the steps, unless a batch was left before its end."""
        if self._place is not _Place.IN_BATCH:
            self._place = place

    def _save(self, *, replace: bool = False) -> None:
        """Writes this step's checkpoint unless it exists; tries again if a worker is lost.

        Args:
            replace: write it even if it exists.
        """
        if self._keeps_checkpoints and (replace or self._saver.saved_step != self._loader.step):
            self._call(self._write)

    def _write(self) -> str:
        # In any case: an attempt that failed elsewhere may have come to its end here.
        self._saver.save(self._loader.step, replace=True)
        return ""

    def _hold_folder(self) -> None:
        """Locks the folder as the new rank 0, after the previous one was lost."""
        assert self._entered is not None
        self._saver.take_over(self._entered)

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function that communicates, such as an evaluation; repeated if a worker is lost.

        All workers call it, after the loop over a batch or after the loop over `steps`. The
        function must not change what the next step depends on, and must itself create what is
        divided over the present workers, such as an `Evaluator`.

        Args:
            function: returns plain data, as JSON has it.

        Returns:
            What the function returned.

        Raises:
            UsageError: if it is called elsewhere, where a worker that joins might be the only one
                to call it, or if the result is not plain data.
        """
        if self._place not in (_Place.BEHIND_BATCH, _Place.BEHIND_STEPS):
            raise UsageError(
                "`call` belongs behind the loop over a global batch, or behind that over `steps`."
            )
        self._num_calls += 1
        return json.loads(self._call(partial(self._found, function)))

    def _call(self, function: Callable[[], str]) -> str:
        """Calls the function until no worker is lost meanwhile; what it returned."""
        return function() if self._changes is None else self._changes.call(function)

    def _found(self, function: Callable[[], Any]) -> str:
        """The function's result as a text; each attempt draws the same random numbers."""
        device = self._state.comm.device
        is_in_steps = self._place is not _Place.BEHIND_STEPS
        place = self._loader.step, is_in_steps, self._num_calls
        with preserved_random_state(device):
            seed_all(derive_seed(self._loader.seed, _CALL, *place), device)
            return _plain(function())

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, to save in a file; the same on each worker.

        Taken inside the loop over `steps`, whoever continues from it runs the code that follows
        this loop in the epoch. Taken after the loop, that code is not run: take it at the end of
        the epoch's body then.

        Raises:
            UsageError: before the end of the loop over a batch, which would be left out.
        """
        if self._place is _Place.IN_BATCH:
            raise UsageError(
                "`state_dict` comes behind the update: before the end of the loop over a global"
                " batch, who goes on from it would leave that batch out."
            )
        awaits_update = self._awaits_update or [x.awaits_update for x in self._exchanges]
        is_over = self._place is _Place.BEHIND_BATCH and self._loader.epoch != self._epoch
        return {
            **self._state.state_dict(awaits_update),
            **self._state.position(),
            "epoch": self._loader.epoch - is_over,
            "is_over": is_over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned, on any number of workers; before entering.

        Raises:
            UsageError: if it was entered: a worker that joins would be the only one to go back.
            CheckpointError: if it was saved with other data, another model or optimizer.
        """
        if self._entered is not None:
            raise UsageError(
                "`load_state_dict` comes before `with`: a worker that joins runs it too."
            )
        self._state.load_state_dict(state)
        self._awaits_update = self._state.awaits_update(state)
        self._was_over = state["is_over"]

    # -- what `steps` asks for -------------------------------------------------------------------

    def begin_steps(self, loader: object, exchanges: tuple[Exchange, ...]) -> bool:
        """Called by `steps` before an epoch's first step; whether any steps are left.

        Raises:
            UsageError: if the arguments differ from `Elastic`'s, outside of `epochs`, or twice in
                one epoch.
        """
        self._state.check_given("elastic", loader, exchanges)
        if self._num_epochs is None:
            raise UsageError(
                "`elastic` must know the epoch in which a worker joins: put `steps` in `for epoch"
                " in elastic.epochs(n):`, in `with Elastic(…) as elastic:`."
            )
        are_left = self._loader.epoch == self._epoch
        if not (are_left or self._was_over):
            refuse_second_loop("elastic")
        return are_left

    def global_batches(self) -> Iterator[GlobalBatch]:
        """The epoch's remaining global batches; before each, waiting workers may join."""
        while self._loader.epoch == self._epoch:
            self._begin_step()
            self._place = _Place.IN_BATCH
            yield next(self._loader.global_batches())

    def after_step(self) -> bool:
        """Called by `steps` after each step; saves if one is due, returns whether to stop."""
        self._awaits_update = [exchange.awaits_update for exchange in self._exchanges]
        self._place = _Place.BEHIND_BATCH  # also if nobody has iterated it
        if self._saver.is_due(self._loader.step):
            self._save()
        number = self.interrupted
        if number is not None and not self._keeps_checkpoints:
            self._saver.interrupted = None
            signal.raise_signal(number)
        return self.interrupted is not None

    def end_steps(self) -> None:
        """Called by `steps` after the epoch's last step, or the step at which a signal ended it."""
        is_last = self._epoch + 1 == self._num_epochs
        if not self._was_over and (self._saver.drain() or is_last):
            self._save()
        self._place, self._num_calls = _Place.BEHIND_STEPS, 0

    def _begin_step(self) -> None:
        self._state.refuse_left_out()
        self._awaits_update, self._num_calls = [], 0
        self._before.clear()
        changes = self._changes
        if changes is None:
            return
        changes.enter(self._loader.step, 0)
        changes.note_position()
        if changes.messages.others_wait:
            changes.change()
        changes.be_ready()
        self._hold_folder()

    def begin_pass(self) -> GlobalBatch | None:
        """Before a batch's micro-batches are run; returns a new division if workers have changed.

        Raises:
            PeerLostError, CollectiveTimeoutError: call `lose_workers`, then begin again.
        """
        changes = self._changes
        if changes is None:
            return None
        if not self._before:
            changes.enter(changes.step, changes.place + 1)
            self._before = [BeforeStep(exchange.model) for exchange in self._exchanges]
        elif changes.is_committing:
            changes.enter(changes.step, changes.place - 1)
        if not changes.has_changed:
            return None
        for before in self._before:
            before.put_back()
        changes.take_up()
        self._hold_folder()
        return next(self._loader.global_batches())

    def commit(self, sums: Tensor) -> Tensor:
        """Sends the last message before an update. Collective.

        Args:
            sums: this worker's sums.

        Returns:
            Their sums over the workers.

        Raises:
            PeerLostError, CollectiveTimeoutError: call `lose_workers`.
        """
        changes = self._changes
        if changes is None:
            self._stop.note(self._stop.asked)
        else:
            changes.enter(changes.step, changes.place + 1, is_committing=True)
            own = self._num_epochs if self._state.comm.rank == 0 else 0
            told = torch.cat([sums.reshape(-1), sums.new_tensor([own])])
            told = changes.messages.commit(told).wait()
            sums = told[:-1].view_as(sums)
            changes.note_committed(json.dumps([sums.tolist(), self._stop.agreed.tolist()]))
            self._check_num_epochs(int(told[-1]))
        self._place = _Place.BEHIND_BATCH
        return sums

    def lose_workers(self) -> Tensor | None:
        """Continues with the remaining workers. Collective.

        Returns:
            What `commit` would have returned, if another worker received it; None to run the step
            again.

        Raises:
            PeerLostError: if too few workers are left, or if the launcher has ended.
        """
        assert self._changes is not None
        text = self._changes.text_of_others()
        if text is None:
            return None
        sums, agreed = (torch.tensor(x, dtype=torch.float64) for x in json.loads(text))
        self._stop.note(agreed)
        self._place = _Place.BEHIND_BATCH
        return sums

    def _check_num_epochs(self, of_rank_0: int) -> None:
        """Refuses another number than rank 0's: one worker would wait for others that are done."""
        if self._num_epochs != of_rank_0:
            raise UsageError(
                f"`num_epochs` (={self._num_epochs}) of `epochs` differs from that of rank 0"
                f" (={of_rank_0}): give all workers the same."
            )

    def _training(self) -> dict[str, object]:
        """Everything that workers must have in common to train together."""
        assert isinstance(self._loader, MapLoader)  # `check_loop` has seen to it
        return {
            "data and state": self._state.options(),
            "samples": self._loader.first_samples(),
            **{
                f"model {n}": {**exchange.policy.in_words, **parameters_of(exchange.model)}
                for n, exchange in enumerate(self._exchanges)
            },
            "checkpoints": dict(self._saver.shared_options),
            "threads": torch.get_num_threads(),
        }


def loop_membership(launch: Launch, grace_s: float, system: System | None = None) -> Membership:
    """The membership of a worker in a user's own loop.

    Args:
        launch, grace_s, system: as in `Membership`.
    """
    return Membership(
        launch,
        grace_s=grace_s,
        rejoins=False,  # in the midst of the user's code
        lets_in=lambda progress: progress % PLACES == 0,
        system=system,
    )


_CALL = 0x63616C6C  # keeps random numbers apart, of what `Elastic.call` calls


def _plain(found: object) -> str:
    """Plain data as a text.

    Raises:
        UsageError: if `found` is not plain data.
    """
    try:
        return json.dumps(found)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"`function` returned what is no plain data ({error}); return numbers, such as"
            " `float(tensor)`, in lists or dicts."
        ) from None
