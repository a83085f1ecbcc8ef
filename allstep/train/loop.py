"""The training loop: updates, with a log, checkpoints, evaluations and a way to stop."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.train.metrics import MetricsLog
from allstep.train.options import TrainOptions
from allstep.train.progress import Progress
from allstep.train.report import Meter, RunReport
from allstep.train.run import Run
from allstep.train.saver import Saver
from allstep.train.step import Update
from allstep.train.stop import Interrupts
from allstep.train.task import Task


def fit(
    task: Task,
    options: TrainOptions,
    comm: Communicator,
    run_dir: Path | str,
    *,
    resume: bool = False,
) -> RunReport:
    """Trains a task on the workers of `comm`; the result does not depend on their number.

    SIGINT and SIGTERM end the run after the current step with a checkpoint.

    Args:
        task: model, data, loss, metrics, optimizer.
        options: epochs, batches, precision, what is kept on disk.
        comm: the workers; each of them must call this.
        run_dir: folder for checkpoints and metrics; made if missing.
        resume: continue from the folder's newest whole checkpoint.

    Returns:
        The run's numbers, the same on every worker.

    Raises:
        UsageError: if options or data don't fit, if another process trains in the folder, or if
            it holds another run.
        CheckpointError: if there is nothing to resume, or if it is of another model.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> def squared_error(model, batch):
        ...     x, y = batch
        ...     return (model(x) - y).square().mean()
        >>> samples = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
        >>> task = Task(
        ...     model=nn.Linear(2, 1),
        ...     train_set=samples,
        ...     test_set=samples,
        ...     loss=squared_error,
        ...     metrics=lambda model, batch: {
        ...         "error": (len(batch[0]) * squared_error(model, batch), len(batch[0]))
        ...     },
        ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ... )
        >>> options = TrainOptions(epochs=2, global_batch=4, micro_batch=2)
        >>> with tempfile.TemporaryDirectory() as run_dir:
        ...     report = fit(task, options, Communicator.single_process(), run_dir)
        >>> report.num_steps, list(report.metrics)
        (4, ['error'])
    """
    with closing(Run(task, options, comm)) as run, Interrupts() as interrupts:
        loop = Loop(
            run,
            comm,
            Path(run_dir),
            interrupts,
            epochs=options.epochs,
            log_every_steps=options.log_every_steps,
            checkpoint_every_steps=options.checkpoint_every_steps,
            evaluate_every_epochs=options.evaluate_every_epochs,
            keep_checkpoints=options.keep_checkpoints,
        )
        loop.run(resume=resume)
        return _report(run, loop, comm, Path(run_dir))


class Training(Protocol):
    """What the loop drives; all workers call each of its methods.

    `state_dict` holds everything that the next update depends on, `step` included; the one of
    rank 0 is stored. After `load_state_dict` the training goes on as if it had not stopped.
    """

    @property
    def step(self) -> int:
        """Updates made since the run's start."""

    @property
    def epoch(self) -> int:
        """Whole passes over the data since the run's start."""

    @property
    def num_total_steps(self) -> int | None:
        """Updates of the whole run, None if that is not known."""

    def begin_epoch(self) -> bool:
        """Takes up what belongs to `epoch`; returns whether its samples are of another kind."""

    def updates(self) -> Iterator[Update]:
        """Makes the rest of the epoch's updates, one each time that it is asked for the next."""

    def mean_loss(self, loss: Tensor, num_steps: int) -> float:
        """The mean over all workers and `num_steps` steps, of whose updates `loss` is the sum."""

    def scalars(self, loss: float) -> Mapping[str, float]:
        """What to log beside the mean loss since the last line."""

    def flush(self) -> None:
        """Makes the updates that are still to come after the last epoch's end."""

    def evaluate(self) -> Mapping[str, float]:
        """Metrics on the test set; empty where there is nothing to measure."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Loop:
    """Drives a training from its start, or from its newest checkpoint, to the end.

    A signal ends it after the current step, on all workers after the same one, with a checkpoint.

    Args:
        training: makes the updates.
        comm: the workers.
        run_dir: folder for checkpoints and metrics; made if missing.
        interrupts: tells that a signal has come.
        epochs: of the whole run.
        log_every_steps: updates between two lines of the log.
        checkpoint_every_steps: updates between two checkpoints; None for one an epoch.
        evaluate_every_epochs: epochs between two evaluations; the last one is always evaluated.
        keep_checkpoints: how many of the newest stay.

    Attributes:
        meter: how fast it went.
        metrics: of the last evaluation; empty if there was none.
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
    ) -> None:
        self._training = training
        self._comm = comm
        self._saver = Saver(
            self,
            comm,
            run_dir,
            interrupts,
            every_steps=checkpoint_every_steps,
            keep=keep_checkpoints,
        )
        self._log = MetricsLog(run_dir, comm)
        self._epochs = epochs
        self._log_every_steps = log_every_steps
        self._evaluate_every_epochs = evaluate_every_epochs
        self._losses = torch.zeros((), dtype=torch.float64)
        self._num_losses = 0
        self._evaluated_step: int | None = None
        self._evaluated_epoch = 0
        self.meter = Meter()
        self.metrics: Mapping[str, float] = {}

    @property
    def checkpoint(self) -> Path | None:
        """The newest one that was written."""
        return self._saver.newest

    @property
    def interrupted(self) -> int | None:
        """Number of the signal that ended it early, or None."""
        return self._saver.interrupted

    def run(self, *, resume: bool = False) -> None:
        """Trains until the last epoch's end or an agreed stop.

        Raises:
            UsageError: if another process trains in the folder, or if it holds another run and
                `resume` is False.
            CheckpointError: if there is nothing to resume, or if it does not fit the training.
        """
        with self._saver.hold(resume=resume):
            self._train()

    def state_dict(self) -> dict[str, Any]:
        """The training's state, which epoch was evaluated last, and losses not logged yet."""
        return {
            **self._training.state_dict(),
            "evaluated_epoch": self._evaluated_epoch,
            "losses": self._comm.all_reduce(self._losses.to(self._comm.device, copy=True)),
            "num_losses": self._num_losses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave, with an evaluation if one was still to come."""
        self._training.load_state_dict(state)
        self._evaluated_epoch = state["evaluated_epoch"]
        losses = state["losses"].to(self._comm.device)  # of all workers together
        self._losses = losses if self._comm.rank == 0 else torch.zeros_like(losses)
        self._num_losses = state["num_losses"]

    def _train(self) -> None:
        with (
            closing(self._log),
            Progress(self._training.num_total_steps, self._comm, epochs=self._epochs) as progress,
        ):
            if self._training.epoch >= self._epochs:  # the run may have ended before it could
                self._training.flush()
            self._evaluate_if_due(progress)
            while self._training.epoch < self._epochs and self.interrupted is None:
                self._train_epoch(progress)
                self._end_epoch(progress)
            if self.interrupted is None and self._evaluated_step != self._training.step:
                self._evaluate(progress)

    def _train_epoch(self, progress: Progress) -> None:
        training = self._training
        if training.begin_epoch():
            self.meter = Meter()  # such samples take another time
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
            # What may have been saved after the last step is of before the last updates.
            self._saver.save(self._training.step, replace=is_last)
        if self.interrupted is None:
            self._evaluate_if_due(progress)

    def _mean_loss(self) -> float:
        """Since the last line; the one wait for the device in the loop."""
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


def _report(run: Run, loop: Loop, comm: Communicator, run_dir: Path) -> RunReport:
    """The run's numbers; measures the cost of a sample if the run came to its end."""
    meter = loop.meter
    local = [meter.samples_per_s, meter.data_share, meter.exchange_share, meter.data_wait_s]
    means = comm.all_reduce(torch.tensor(local, dtype=torch.float64), "mean").tolist()
    samples_per_s, data_share, exchange_share, data_wait_s = means
    flops_per_sample = single_worker_samples_per_s = None
    if loop.interrupted is None and meter.num_samples:
        flops_per_sample, seconds = run.cost_of_sample()
        if comm.size > 1:
            wait_s = data_wait_s * comm.size / meter.num_samples
            single_worker_samples_per_s = 1 / (seconds + wait_s)
    return RunReport(
        run_dir=run_dir,
        num_steps=run.step,
        num_epochs=run.epoch,
        metrics=loop.metrics,
        totals=run.totals if loop.metrics else {},
        samples_per_s=samples_per_s,
        num_timed_steps=meter.num_timed_steps,
        data_share=data_share,
        exchange_share=exchange_share,
        flops_per_sample=flops_per_sample,
        single_worker_samples_per_s=single_worker_samples_per_s,
        noise_scale=run.noise.scale.value,
        mean_noise_scale=run.noise.mean_scale.value,
        useful_batch=run.noise.summary,
        num_skipped=run.train_step.num_skipped,
        shares=run.shares,
        checkpoint=loop.checkpoint,
        interrupted=loop.interrupted,
    )
