"""A user's own loop that goes on where it was: it saves by itself and resumes by itself."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from allstep.comm.agreement import agree
from allstep.data.batches import GlobalBatchLoader
from allstep.data.random import preserved_random_state
from allstep.errors import UsageError, check_integer
from allstep.exchange import Exchange
from allstep.train.checkpoint import Stateful
from allstep.train.loop_state import LoopState, refuse_second_loop
from allstep.train.saver import Saver
from allstep.train.stop import Interrupts


class AutoCheckpoint:
    """Lets a loop over `steps` be stopped, started again, and continue as if it had never stopped.

    On entry it loads the newest complete checkpoint, if there is one, on any number of workers.
    While entered, it locks the folder against other processes, and SIGINT or SIGTERM ends the loop
    after the current step with a checkpoint. All workers make the same calls; only rank 0 touches
    the disk.

    A checkpoint holds the models of `exchanges`, which of their parameters are frozen, gradients
    that are exchanged late, `state`, the position in the data and the number of the epoch. Random
    states follow from these and the loader's seed: one for each micro-batch (see `steps`), and one
    for each epoch, for the code around the steps.

    Args:
        run_dir: the checkpoints' folder; made if missing. With None, as from an option that was not
            given, the loop is the same and signals end it after a step, but nothing is saved.
        loader: from `allstep.data.loader`.
        exchanges: from `allstep.attach`, the same that `steps` is given.
        state: name -> object with `state_dict` and `load_state_dict` that the next step also
            depends on: optimizers, learning-rate schedulers, a GradScaler.
        every_steps: steps between two checkpoints.
        every_s: seconds between two checkpoints, by rank 0's clock; both may be given. With
            neither, a checkpoint is written after the last step of each epoch, and again when the
            code around the steps has run. The very last step is always followed by one.
        keep: number of newest checkpoints that are kept.
        clock: returns the time in seconds.

    Raises:
        UsageError: if an argument is of a wrong kind or out of range.

    Example:
        >>> import tempfile, torch, allstep
        >>> from torch.utils.data import TensorDataset
        >>> comm = allstep.Communicator.single_process()
        >>> samples = TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
        >>> def train(run_dir, num_epochs):
        ...     model = torch.nn.Linear(3, 1)
        ...     exchange = allstep.attach(model, comm)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ...     loader = allstep.data.loader(samples, comm, global_batch=4, micro_batch=2)
        ...     state = {"optimizer": optimizer}
        ...     with allstep.AutoCheckpoint(run_dir, loader, exchange, state=state) as checkpoint:
        ...         for epoch in checkpoint.epochs(num_epochs):
        ...             for batch in allstep.steps(loader, exchange, checkpoint=checkpoint):
        ...                 for x, y in batch:
        ...                     batch.backward(torch.nn.functional.mse_loss(model(x), y))
        ...                 optimizer.step()
        ...                 optimizer.zero_grad()
        ...                 print(f"epoch {epoch}, step {batch.step}")
        >>> with tempfile.TemporaryDirectory() as run_dir:
        ...     train(run_dir, 1)
        ...     train(run_dir, 2)  # goes on
        epoch 0, step 0
        epoch 0, step 1
        epoch 0, step 2
        epoch 1, step 3
        epoch 1, step 4
        epoch 1, step 5
    """

    def __init__(
        self,
        run_dir: Path | str | None,
        loader: GlobalBatchLoader,
        *exchanges: Exchange,
        state: Mapping[str, Stateful],
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = LoopState(loader, exchanges, state)
        self._loader, self._exchanges = loader, exchanges
        self._comm = self._state.comm
        self._interrupts = Interrupts()
        self._saver = Saver(
            self,
            self._comm,
            None if run_dir is None else Path(run_dir).absolute(),
            self._interrupts,
            every_steps=every_steps,
            every_s=every_s,
            keep=keep,
            clock=clock,
        )
        self._entered: ExitStack | None = None
        self._epoch = 0  # the present one, or the next
        self._num_epochs: int | None = None  # in `epochs`
        self._is_over = False  # all steps of the present epoch have been made,
        self._was_over = False  # and that in an earlier life
        self._data_epoch = 0  # the loader's, when the steps began
        self._awaits_update = [False] * len(exchanges)

    @property
    def interrupted(self) -> int | None:
        """Number of the signal by which the workers agreed to stop, or None."""
        return self._saver.interrupted

    def __enter__(self) -> Self:
        if self._entered is not None:
            raise UsageError("An AutoCheckpoint is entered once; make another one.")
        with ExitStack() as stack:
            stack.enter_context(self._interrupts)
            stack.enter_context(self._saver.hold_for_loop())
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._entered is not None
        if error_type is None:
            self._entered.callback(self._saver.drain)
        self._entered.__exit__(error_type, error, trace)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The remaining epochs, beginning with one that was left unfinished; none after a signal.

        Each epoch holds one loop over `steps`. Code that follows this loop in the epoch's body runs
        again if the newest checkpoint was written before it.

        Args:
            num_epochs: epochs of the whole training, including those before a restart.

        Yields:
            The epoch's number, counted from 0 over all restarts.

        Raises:
            UsageError: outside of `with`, or if `num_epochs` is not positive.
            DisagreementError: if `num_epochs` differs between workers.
        """
        check_integer("num_epochs", num_epochs)
        if self._entered is None or self._num_epochs is not None:
            raise UsageError("`epochs` is for `with AutoCheckpoint(…) as checkpoint:`, once.")
        agree(self._comm, "train some epochs", [("num_epochs", num_epochs)])
        self._num_epochs = num_epochs
        return self._epochs(num_epochs)

    def _epochs(self, num_epochs: int) -> Iterator[int]:
        with preserved_random_state(self._comm.device), self._state.kept_by("checkpoint"):
            while self._epoch < num_epochs and self.interrupted is None:
                self._state.seed_epoch(self._epoch)
                yield self._epoch
                if self.interrupted is None:
                    self._end_epoch(num_epochs)

    def _end_epoch(self, num_epochs: int) -> None:
        """Ends an epoch; a signal may have come since its last step."""
        self._epoch += 1
        self._is_over = self._was_over = False
        self._data_epoch = self._loader.epoch
        self._saver.after_step(self._loader.step)
        is_last = self._epoch == num_epochs
        if self._saver.drain() or is_last:
            # So that only the last one's end is run again, without the steps before it.
            self._saver.save(self._loader.step, replace=not is_last)

    def begin_steps(self, loader: object, exchanges: tuple[Exchange, ...]) -> bool:
        """Called by `steps` before an epoch's first step; whether any steps are left."""
        self._state.check_given("checkpoint", loader, exchanges)
        if self._num_epochs is None:
            raise UsageError(
                "`checkpoint` counts epochs: put `steps` in `for epoch in checkpoint.epochs(n):`,"
                " in `with AutoCheckpoint(…) as checkpoint:`."
            )
        if self._is_over and not self._was_over:
            refuse_second_loop("checkpoint")
        self._data_epoch = self._loader.epoch
        was_over, self._was_over = self._was_over, False
        return not was_over

    def after_step(self) -> bool:
        """Called by `steps` after each step; saves if one is due, returns whether to stop."""
        self._state.refuse_left_out()
        self._awaits_update = [exchange.awaits_update for exchange in self._exchanges]
        return self._saver.after_step(self._loader.step)

    def end_steps(self) -> None:
        """Called by `steps` after the epoch's last step, or the step at which a signal ended it."""
        is_due = self._saver.drain()
        self._is_over = self._is_over or self.interrupted is None
        assert self._num_epochs is not None
        if is_due or self._epoch + 1 == self._num_epochs:
            self._saver.save(self._loader.step)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on. All workers call it."""
        for exchange in self._exchanges:
            exchange.sync_buffers()
        return {
            **self._state.state_dict(self._awaits_update),
            "exchanges": self._state.exchange_states(),
            "loader": self._loader.state_dict(),
            "epoch": self._epoch,
            "is_over": self._is_over or self._loader.epoch != self._data_epoch,
        }

    def local_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a `state_dict` that this worker loads. All workers call it."""
        return self._state.local(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `local_state` returned. All workers call it.

        Raises:
            CheckpointError: if it was saved with other data, another policy, model or optimizer.
        """
        self._state.load_state_dict(state)
        self._awaits_update = self._state.awaits_update(state)
        self._epoch = state["epoch"]
        self._is_over = self._was_over = state["is_over"]
        self._data_epoch = self._loader.epoch
