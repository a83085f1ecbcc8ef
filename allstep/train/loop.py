"""The training loop: makes updates, logs, saves checkpoints, evaluates and stops."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.train.best import BestMetric
from allstep.train.metrics import Logger, MetricsLog
from allstep.train.progress import Progress
from allstep.train.report import Meter
from allstep.train.saver import Saver
from allstep.train.step import Update
from allstep.train.stop import Interrupts, StepStopAgreement


class Training(Protocol):
    """The training that the loop drives; all workers call each of its methods.

    `state_dict` holds everything that the next update depends on, including `step`; rank 0's is
    stored. After `load_state_dict` the training continues as if it had not stopped; `local_state`
    is the part of the state that this worker needs for it. [Note: divided checkpoints]
    """

    @property
    def step(self) -> int:
        """Updates made since the run's start."""

    @property
    def epoch(self) -> int:
        """Whole passes over the data since the run's start."""

    @property
    def num_total_steps(self) -> int | None:
        """Updates of the whole run; None if their number is unknown."""

    def begin_epoch(self) -> bool:
        """Prepares the data of `epoch`; returns whether its samples are of another kind."""

    def updates(self) -> Iterator[Update]:
        """Makes the epoch's remaining updates, one each time that the next is requested."""

    def mean_loss(self, loss: Tensor, num_steps: int) -> float:
        """The mean loss over all workers and `num_steps` steps; `loss` is the sum over these."""

    def scalars(self, loss: float) -> Mapping[str, float]:
        """Further scalars for a line of the log; `loss` is the mean loss since the last line."""

    def flush(self) -> bool:
        """Makes the updates that are still due after the last epoch, if any."""

    def evaluate(self) -> Mapping[str, float]:
        """Metrics on the test set; empty if there is nothing to measure."""

    def state_dict(self) -> dict[str, Any]: ...

    def local_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Loop:
    """Drives a training from its start, or from its newest checkpoint, to the end.

    A signal ends it after the current step, on all workers after the same one, with a checkpoint.

    Args:
        training: makes the updates.
        comm: the workers.
        run_dir: folder for checkpoints and metrics; made if missing.
        interrupts: reports signals.
        epochs: number of epochs of the whole run.
        log_every_steps: updates between two lines of the log.
        checkpoint_every_steps: updates between two checkpoints; None for one an epoch.
        evaluate_every_epochs: epochs between two evaluations; the last one is always evaluated.
        keep_checkpoints: number of newest checkpoints that are kept.
        best: decides which evaluation's checkpoint is kept beside them, and when to stop early.
        loggers: receive each record of the log, on rank 0.
        has_global_losses: whether updates hold the loss over all workers, not this worker's part.
        data_axis: the workers that train on different samples; by default all.
        agreement: as in `Saver`.

    Attributes:
        has_begun: whether the state to continue from is loaded.
        meter: measures the training's speed.
        metrics: results of the last evaluation; empty if there was none.
        best: as given.
    """

    def __init__(
        self,
        training: Training,
        comm: Communicator,
        run_dir: Path,
        interrupts: Interrupts,
        *,
        epochs: int,
        log_every_steps: int,
        checkpoint_every_steps: int | None = None,
        evaluate_every_epochs: int = 1,
        keep_checkpoints: int = 3,
        best: BestMetric | None = None,
        loggers: Sequence[Logger] = (),
        has_global_losses: bool = False,
        data_axis: Communicator | None = None,
        agreement: StepStopAgreement | None = None,
    ) -> None:
        self._training = training
        self._has_global_losses = has_global_losses
        self.has_begun = False
        self._comm = comm
        self._data_axis = data_axis or comm
        self._saver = Saver(
            self,
            comm,
            run_dir,
            interrupts,
            every_steps=checkpoint_every_steps,
            keep=keep_checkpoints,
            agreement=agreement,
        )
        self._log = MetricsLog(run_dir, comm, loggers=loggers, keeps_last=has_global_losses)
        self.best = best
        self._epochs = epochs
        self._log_every_steps = log_every_steps
        self._evaluate_every_epochs = evaluate_every_epochs
        self._losses = torch.zeros((), dtype=torch.float64)
        self._num_losses = 0
        self._evaluated_step: int | None = None
        self._evaluated_epoch = self._ended_epoch = 0
        self.meter = Meter()
        self.metrics: Mapping[str, float] = {}

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint."""
        return self._saver.newest

    @property
    def best_checkpoint(self) -> Path | None:
        """The best evaluation's checkpoint; None if no evaluation has counted yet."""
        has_best = self.best is not None and self.best.step is not None
        return self._saver.best_path if has_best else None

    @property
    def interrupted(self) -> int | None:
        """Number of the signal that ended the loop early, or None."""
        return self._saver.interrupted

    @property
    def stopped_early(self) -> bool:
        """Whether the loop ended before the last epoch because evaluations no longer improved."""
        is_exhausted = self.best is not None and self.best.is_exhausted
        return is_exhausted and self._training.epoch < self._epochs

    def run(
        self,
        *,
        resume: bool | Literal["auto"] = False,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Trains until the last epoch's end or an agreed stop.

        Args:
            resume: as in `fit`.
            state: continue from this state of a running training instead of a checkpoint.

        Raises:
            UsageError: if `resume` is not a valid value, if another process trains in the folder,
                or if it holds another run and `resume` is False.
            CheckpointError: if there is nothing to resume, or if it does not fit the training.
        """
        if resume not in (True, False, "auto"):
            raise UsageError(f"`resume` (={resume!r}) must be True, False or 'auto'.")
        with self._saver.hold(resume=None if resume == "auto" else resume, state=state):
            if self.best is not None:
                self.best.take_saved(self._saver.load_best(lambda state: state.get("best")))
            self._note_evaluation()
            self.has_begun = True
            if state is not None and self._training.step:
                # The worker that had to write this step's checkpoint may have been lost before.
                self._saver.after_step(self._training.step)
            self._train()

    def state_dict(self) -> dict[str, Any]:
        """The training's state, the evaluations' results, and losses not logged yet."""
        losses = self._losses.to(self._comm.device, copy=True)
        if not self._has_global_losses:
            losses = self._data_axis.all_reduce(losses)
        return {
            **self._training.state_dict(),
            **self._evaluations(),
            "losses": losses,
            "num_losses": self._num_losses,
        }

    def own_state(self) -> dict[str, Any]:
        """The loop's own part of `state_dict`, without communication.

        During a step or an evaluation it is the state from before that.
        """
        return {
            **self._noted_evaluations,
            "losses": self._losses,
            "num_losses": self._num_losses,
            "ended_epoch": self._ended_epoch,
            "last_records": self._log.last,
        }

    def _note_evaluation(self) -> None:
        """Records that an evaluation is over, and its best checkpoint written, if it was best."""
        self._noted_evaluations = self._evaluations()

    def _evaluations(self) -> dict[str, Any]:
        return {
            "evaluated_epoch": self._evaluated_epoch,
            "best": None if self.best is None else self.best.state_dict(),
        }

    def local_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a `state_dict` that this worker loads. Collective."""
        return self._training.local_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned, with an evaluation if one is still due."""
        self._training.load_state_dict(state)
        self._evaluated_epoch = state["evaluated_epoch"]
        if self.best is not None and state.get("best") is not None:
            self.best.load_state_dict(state["best"])
        losses = state["losses"].to(self._comm.device)  # of all workers together
        has_part = self._data_axis.rank == 0 or self._has_global_losses
        self._losses = losses if has_part else torch.zeros_like(losses)
        self._ended_epoch = state.get("ended_epoch", self._training.epoch)
        self._log.complete(state.get("last_records", ()))
        self._num_losses = state["num_losses"]

    def _train(self) -> None:
        self._comm.activity.num_total_steps = self._training.num_total_steps
        with (
            closing(self._log),
            Progress(self._training.num_total_steps, self._comm, epochs=self._epochs) as progress,
        ):
            if self._training.epoch > self._ended_epoch:  # the others' last step was its last
                self._end_epoch(progress)
            # The run may have ended before the evaluation could be made.
            if self._training.epoch >= self._epochs and self._training.flush():
                self._saver.save(self._training.step, replace=True)
            self._evaluate_if_due(progress)
            while not self._is_over:
                self._train_epoch(progress)
                self._end_epoch(progress)
            if self.stopped_early:
                self._saver.save(self._training.step)
                assert self.best is not None
                progress.note(
                    f"stopped early after {self.best.patience} evaluations without a gain; best:"
                    f" {self.best.summary}"
                )
            if self.interrupted is None and self._evaluated_step != self._training.step:
                self._evaluate(progress)

    @property
    def _is_over(self) -> bool:
        is_last = self._training.epoch >= self._epochs
        return is_last or self.interrupted is not None or self.stopped_early

    def _train_epoch(self, progress: Progress) -> None:
        training = self._training
        if training.begin_epoch():
            self.meter = Meter()  # the next stage's samples take another time
        start_s = time.perf_counter()
        for update in training.updates():
            self._losses = self._losses + update.loss
            self._num_losses += 1
            is_logged = update.is_logged or training.step % self._log_every_steps == 0
            loss = self._mean_loss() if is_logged else None
            self.meter.add(update, time.perf_counter() - start_s)
            if loss is not None:
                self._write(update, loss, progress)
            progress.advance(training.step)
            if self._saver.after_step(training.step):
                break
            start_s = time.perf_counter()

    def _end_epoch(self, progress: Progress) -> None:
        is_save_due = self._saver.drain()
        epoch = self._training.epoch
        is_last = epoch >= self._epochs
        if is_last and self.interrupted is None:
            self._training.flush()
        if is_save_due or is_last:
            # A checkpoint that was saved after the last step lacks the last updates.
            self._saver.save(self._training.step, replace=is_last)
            if self._has_global_losses:  # elastic: rank 0 may be lost before it has written it
                self._comm.barrier()
        if self.interrupted is None:
            self._evaluate_if_due(progress)
        self._ended_epoch = epoch

    def _mean_loss(self) -> float:
        """The mean loss since the last line of the log; the loop's only wait for the device."""
        loss = self._training.mean_loss(self._losses, self._num_losses)
        self._losses = torch.zeros((), dtype=torch.float64)
        self._num_losses = 0
        return loss

    def _write(self, update: Update, loss: float, progress: Progress) -> None:
        step, samples_per_s = self._training.step, self.meter.samples_per_s
        scalars = self._training.scalars(loss)
        self._comm.activity.metrics = {"loss": loss, "samples_per_s": samples_per_s}
        self._log.write(step, update.epoch, loss=loss, samples_per_s=samples_per_s, **scalars)
        counts = [n for name, n in scalars.items() if name.startswith("micro_batches/")]
        progress.update(
            step,
            update.epoch,
            loss,
            samples_per_s,
            scalars.get("noise_scale"),
            micro_batches=counts,
        )

    def _evaluate_if_due(self, progress: Progress) -> None:
        epoch = self._training.epoch
        if epoch > self._evaluated_epoch and epoch % self._evaluate_every_epochs == 0:
            self._evaluate(progress)

    def _evaluate(self, progress: Progress) -> None:
        step, epoch = self._training.step, self._training.epoch
        self.metrics = self._training.evaluate()
        self._evaluated_step, self._evaluated_epoch = step, epoch
        if self.metrics:
            self._log.write(step, epoch, **{f"test/{k}": v for k, v in self.metrics.items()})
            shown = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
            progress.note(f"epoch {epoch}: {shown}")
        if self.best is not None and self.best.update(step, self.metrics):
            self._saver.save_best(step)
            if self._has_global_losses:  # elastic: rank 0 may be lost before it has written it
                self._comm.barrier()
        self._note_evaluation()
