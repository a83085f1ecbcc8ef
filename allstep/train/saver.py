"""Decides when a run saves and stops, alike on all its workers, and loads its checkpoint."""

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from allstep.comm import SIGNALLED, Communicator
from allstep.comm.agreement import agree
from allstep.errors import CheckpointError, check_integer, check_positive
from allstep.train.checkpoint import Checkpoints, Select, Stateful
from allstep.train.run_lock import run_lock
from allstep.train.stop import Interrupts, StepStopAgreement, StopAgreement

_logger = logging.getLogger(__name__)


class Saver:
    """Saves a training's checkpoints in a folder that no other process may train in.

    A signal stops the training after the current step, on all workers after the same one. All
    workers call each method.

    Args:
        target: the training.
        comm: the workers.
        run_dir: the folder; made if missing. With None nothing is saved.
        interrupts: reports signals.
        every_steps: updates between two checkpoints.
        every_s: seconds between two checkpoints, by rank 0's clock; with neither, a checkpoint is
            written at the end of each epoch.
        keep: number of newest checkpoints that are kept.
        clock: returns the time in seconds.
        agreement: the message by which workers agree to stop or save; None for one of its own.

    Attributes:
        saved_step: step of the checkpoint that was last written or loaded; None if there is none.
        interrupted: number of the signal by which all agreed to stop, or None.
    """

    def __init__(
        self,
        target: Stateful,
        comm: Communicator,
        run_dir: Path | None,
        interrupts: Interrupts,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        clock: Callable[[], float] = time.monotonic,
        agreement: StopAgreement | StepStopAgreement | None = None,
    ) -> None:
        if every_steps is not None:
            check_integer("every_steps", every_steps)
        if every_s is not None:
            check_positive("every_s", every_s, "give a number of seconds, such as 600.0")
        self.saved_step: int | None = None
        self.interrupted: int | None = None
        self._target = target
        self._comm = comm
        self._run_dir = run_dir
        self._checkpoints: Checkpoints | None = None
        if run_dir is not None:
            self._checkpoints = Checkpoints(run_dir / "checkpoints", comm, keep=keep)
        self._has_lock = False  # of the folder
        self._interrupts = interrupts
        self._agreement = agreement or StopAgreement(comm)
        self._every_steps, self._every_s, self._keep = every_steps, every_s, keep
        self._clock = clock
        self._saved_at_s = clock()  # or when a checkpoint was last requested

    @property
    def shared_options(self) -> list[tuple[str, object]]:
        """Options that must be equal on all workers; only rank 0 needs the value of `every_s`."""
        return [
            ("run_dir is None", self._run_dir is None),
            ("every_steps", self._every_steps),
            ("every_s is None", self._every_s is None),
            ("keep", self._keep),
        ]

    @contextmanager
    def hold(
        self, *, resume: bool | None, state: Mapping[str, Any] | None = None
    ) -> Iterator[int | None]:
        """Locks the folder, loads its checkpoint, and notes the worker's activity while entered.

        Args:
            resume: load the newest checkpoint; False refuses a folder with checkpoints, None loads
                one if there is one.
            state: continue from this state instead of a checkpoint; the same on all workers.

        Yields:
            The step of the checkpoint that was loaded, or None.

        Raises:
            UsageError: if another process trains in the folder, or if it holds another run and
                `resume` is False.
            CheckpointError: if there is nothing to resume, or if it does not fit the training.
        """
        if self._run_dir is None or self._checkpoints is None:
            yield None
            return
        lock = run_lock(self._run_dir, self._comm, goes_on=state is not None)
        with lock as self._has_lock, self._comm.keep_last_state(self._run_dir):
            if state is not None:
                self._target.load_state_dict(state)
            elif resume is False:
                self._checkpoints.refuse_existing()
            else:
                missing_ok = resume is None
                self.saved_step = self._checkpoints.restore(self._target, missing_ok=missing_ok)
            self._saved_at_s = self._clock()
            yield self.saved_step
            if self.interrupted is not None:
                self._comm.activity.end(SIGNALLED, signal.Signals(self.interrupted).name)

    @contextmanager
    def hold_for_loop(self) -> Iterator[None]:
        """As `hold`, for a user's own loop, which loads a checkpoint if there is one.

        Raises:
            DisagreementError: if the workers' options differ.
        """
        agree(self._comm, "keep checkpoints", self.shared_options)
        with self.hold(resume=None) as step:
            if step is not None and self._comm.rank == 0:
                logging.getLogger("allstep").info(f"{self._run_dir} goes on after step {step}")
            yield

    def take_over(self, stack: ExitStack) -> None:
        """Locks the folder if its holder was lost and this worker is the new rank 0.

        Call it again until it succeeds: a holder that was only left behind releases the lock later.

        Args:
            stack: releases the lock when it is closed.
        """
        if self._run_dir is None or self._has_lock or self._comm.rank > 0:
            return
        alone = Communicator.single_process()
        with ExitStack() as held:
            self._has_lock = held.enter_context(run_lock(self._run_dir, alone, goes_on=True))
            if self._has_lock:
                stack.push(held.pop_all())

    def after_step(self, step: int) -> bool:
        """Saves if a checkpoint is due; returns True if the training is to stop, and save then.

        Args:
            step: updates made.
        """
        if self.is_due(step):
            self.save(step)
        return self.interrupted is not None

    def is_due(self, step: int) -> bool:
        """Reads the workers' requests after a step; whether to save and continue.

        Args:
            step: updates made.
        """
        asked = self._agreement(self._interrupts.requested, is_save_due=self._asks_to_save())
        self.interrupted = self.interrupted or asked
        is_multiple = self._every_steps is not None and step % self._every_steps == 0
        return self.interrupted is None and (is_multiple or self._agreement.is_save_due)

    def drain(self) -> bool:
        """Reads the workers' last requests at the end of an epoch's steps; whether to save."""
        asked = self._agreement.drain()
        self.interrupted = self.interrupted or asked
        is_each_epoch = self._every_steps is None and self._every_s is None
        return self.interrupted is not None or self._agreement.is_save_due or is_each_epoch

    def save(self, step: int, *, replace: bool = False) -> None:
        """Writes this step's checkpoint, unless it exists.

        Args:
            step: updates made.
            replace: write it even if it exists.
        """
        if self._checkpoints and (replace or self.saved_step != step):
            self._checkpoints.save(step, self._target.state_dict())
            self.saved_step, self._saved_at_s = step, self._clock()

    @property
    def newest(self) -> Path | None:
        """The checkpoint of `saved_step`, if there is one."""
        if self._checkpoints is None or self.saved_step is None:
            return None
        return self._checkpoints.path(self.saved_step)

    @property
    def best_path(self) -> Path:
        """The folder of the best checkpoint, whether or not there is one."""
        return self._of_run.best_path

    def save_best(self, step: int) -> None:
        """Writes the best checkpoint.

        Args:
            step: updates made.
        """
        self._of_run.save_best(step, self._target.state_dict())

    def load_best(self, select: Select) -> Any:
        """The selected parts of the best checkpoint; None if there is none, or it is damaged."""
        try:
            loaded = self._of_run.load_best(select)
        except CheckpointError as error:
            _logger.warning("%s; the next evaluation will take its place", error)
            return None
        return loaded and loaded[1]

    @property
    def _of_run(self) -> Checkpoints:
        assert self._checkpoints is not None  # only `fit`, which has a folder, keeps the best
        return self._checkpoints

    def _asks_to_save(self) -> bool:
        """Whether a checkpoint is due by rank 0's clock; other workers' clocks may differ."""
        if self._every_s is None or self._comm.rank > 0:
            return False
        now_s = self._clock()
        is_due = now_s - self._saved_at_s >= self._every_s
        if is_due:
            self._saved_at_s = now_s  # not in the next step again
        return is_due
