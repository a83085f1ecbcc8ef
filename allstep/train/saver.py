"""When a run saves and when it stops, on all its workers alike, and what it goes on from."""

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
    """Keeps a training's checkpoints in a folder that no other process may train in.

    A signal stops the training after the current step, on all workers after the same one. All
    workers call each method.

    Args:
        target: the training.
        comm: the workers.
        run_dir: the folder; made if missing. With None nothing is kept.
        interrupts: tells that a signal has come.
        every_steps: updates between two checkpoints.
        every_s: seconds between two checkpoints, by rank 0's clock; with neither, there is one at
            the end of each epoch.
        keep: how many of the newest stay.
        clock: seconds that pass.
        agreement: by which the workers agree to stop, and to save; None for a message of its own.

    Attributes:
        saved_step: of the checkpoint that was written last, or loaded; None for none.
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
        self._saved_at_s = clock()  # or when a checkpoint was asked for

    @property
    def shared_options(self) -> list[tuple[str, object]]:
        """What all workers must have alike, by name; how many seconds only rank 0 needs."""
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
        """Holds the folder, begins with what is there, and keeps what the worker does.

        Args:
            resume: load the newest checkpoint; False refuses a folder with checkpoints, None does
                whichever fits.
            state: to go on from in place of a checkpoint, the same on all workers.

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
        """As `hold`, for a user's own loop, which begins or goes on, whichever fits.

        Raises:
            DisagreementError: if workers would keep checkpoints otherwise.
        """
        agree(self._comm, "keep checkpoints", self.shared_options)
        with self.hold(resume=None) as step:
            if step is not None and self._comm.rank == 0:
                logging.getLogger("allstep").info(f"{self._run_dir} goes on after step {step}")
            yield

    def take_over(self, stack: ExitStack) -> None:
        """Holds the folder once its holder was lost, and this worker is rank 0.

        To be called again, until a holder that was only left behind has let go of it.

        Args:
            stack: lets go of it.
        """
        if self._run_dir is None or self._has_lock or self._comm.rank > 0:
            return
        alone = Communicator.single_process()
        with ExitStack() as held:
            self._has_lock = held.enter_context(run_lock(self._run_dir, alone, goes_on=True))
            if self._has_lock:
                stack.push(held.pop_all())

    def after_step(self, step: int) -> bool:
        """Saves if it is time to; returns whether to stop instead, and save then.

        Args:
            step: updates made.
        """
        if self.is_due(step):
            self.save(step)
        return self.interrupted is not None

    def is_due(self, step: int) -> bool:
        """Learns, after a step, what workers asked; whether to save, and not to stop.

        Args:
            step: updates made.
        """
        asked = self._agreement(self._interrupts.requested, is_save_due=self._asks_to_save())
        self.interrupted = self.interrupted or asked
        is_multiple = self._every_steps is not None and step % self._every_steps == 0
        return self.interrupted is None and (is_multiple or self._agreement.is_save_due)

    def drain(self) -> bool:
        """Learns, at the end of an epoch's steps, what the last ones asked; whether to save."""
        asked = self._agreement.drain()
        self.interrupted = self.interrupted or asked
        is_each_epoch = self._every_steps is None and self._every_s is None
        return self.interrupted is not None or self._agreement.is_save_due or is_each_epoch

    def save(self, step: int, *, replace: bool = False) -> None:
        """Writes a checkpoint, unless that of this step is there.

        Args:
            step: updates made.
            replace: write it in any case.
        """
        if self._checkpoints and (replace or self.saved_step != step):
            self._checkpoints.save(step, self._target.state_dict())
            self.saved_step, self._saved_at_s = step, self._clock()

    @property
    def newest(self) -> Path | None:
        """The checkpoint of `saved_step`, if any."""
        if self._checkpoints is None or self.saved_step is None:
            return None
        return self._checkpoints.path(self.saved_step)

    @property
    def best_path(self) -> Path:
        """The folder of the best checkpoint, should there be one."""
        return self._of_run.best_path

    def save_best(self, step: int) -> None:
        """Writes the best checkpoint.

        Args:
            step: updates made.
        """
        self._of_run.save_best(step, self._target.state_dict())

    def load_best(self, select: Select) -> Any:
        """What is wanted of the best checkpoint; None if there is none, or it is damaged."""
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
        """Rank 0's clock counts: others may be ahead of it, or behind."""
        if self._every_s is None or self._comm.rank > 0:
            return False
        now_s = self._clock()
        is_due = now_s - self._saved_at_s >= self._every_s
        if is_due:
            self._saved_at_s = now_s  # not in the next step again
        return is_due
