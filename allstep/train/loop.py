"""The training loop: epochs of steps, with evaluation, checkpoints and a way to stop."""

from contextlib import closing
from pathlib import Path

import torch

from allstep.comm import Communicator
from allstep.train.agreement import StopAgreement
from allstep.train.batch import Batch, steps
from allstep.train.interrupts import Interrupts
from allstep.train.meter import Meter
from allstep.train.metrics import MetricsLog
from allstep.train.options import TrainOptions
from allstep.train.progress import Progress
from allstep.train.report import RunReport
from allstep.train.run import Run
from allstep.train.task import Task

__all__ = ["fit"]


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
        UsageError: if options or data don't fit, or if the folder holds another run.
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
    run_dir = Path(run_dir)
    with (
        closing(Run(task, options, comm, run_dir)) as run,
        closing(MetricsLog(run_dir, comm)) as log,
        Interrupts() as interrupts,
    ):
        if resume:
            run.restore()
        else:
            run.refuse_old_checkpoints()
        with Progress(run.num_total_steps, comm, epochs=options.epochs) as progress:
            loop = _Loop(run, options, comm, log, progress, interrupts)
            loop.run()
            return loop.report(run_dir)


class _Loop:
    """One pass through `fit`."""

    def __init__(
        self,
        run: Run,
        options: TrainOptions,
        comm: Communicator,
        log: MetricsLog,
        progress: Progress,
        interrupts: Interrupts,
    ) -> None:
        self._run = run
        self._options = options
        self._comm = comm
        self._log = log
        self._progress = progress
        self._interrupts = interrupts
        self._meter = Meter()
        self._losses = torch.zeros((), dtype=torch.float64)
        self._num_losses = 0
        self._metrics: dict[str, float] = {}
        self._evaluated_step: int | None = None
        self._saved_step: int | None = None
        self._interrupted: int | None = None

    def run(self) -> None:
        """Trains until the last epoch's end or an agreed stop."""
        options = self._options
        while self._run.loader.epoch < options.epochs and self._interrupted is None:
            if self._run.advance():
                self._meter = Meter()  # samples of another stage take another time
            self._train_epoch()
            epoch = self._run.loader.epoch
            is_last = epoch >= options.epochs
            if is_last and self._interrupted is None:
                self._run.flush()
            if options.checkpoint_every_steps is None or is_last or self._interrupted is not None:
                self._save()
            if self._interrupted is None and epoch % options.evaluate_every_epochs == 0:
                self._evaluate()
        if self._interrupted is None and self._evaluated_step != self._run.loader.step:
            self._evaluate()

    def _train_epoch(self) -> None:
        every = self._options.checkpoint_every_steps
        agreement = StopAgreement(self._comm)
        for batch in steps(self._run.loader, self._run.exchange):
            self._train(batch)
            self._interrupted = agreement(self._interrupts.requested)
            if self._interrupted is not None:
                break
            if every is not None and self._run.loader.step % every == 0:
                self._save()
        asked_last = agreement.drain()
        self._interrupted = self._interrupted or asked_last

    def _train(self, batch: Batch) -> None:
        exposed_before_s = self._run.exchange.stats().exposed_s
        with self._meter.step():
            self._losses = self._losses + self._run.train_step(batch)
            self._num_losses += 1
            self._meter.add(
                num_samples=batch.num_samples,
                data_wait_s=batch.data_wait_s,
                exchange_s=self._run.exchange.stats().exposed_s - exposed_before_s,
            )
            if self._run.loader.step % self._options.log_every_steps == 0:
                self._log_loss(batch)
        self._progress.advance(self._run.loader.step)

    def _log_loss(self, batch: Batch) -> None:
        """Writes the mean loss since the last line; the one wait for the device in the loop."""
        noise = self._run.noise
        loss = float(noise.all_reduce(self._comm, self._losses).item()) / self._num_losses
        self._losses = torch.zeros((), dtype=torch.float64)
        self._num_losses = 0
        samples_per_s = self._meter.samples_per_s
        self._log.write(
            self._run.loader.step,
            batch.epoch,
            loss=loss,
            samples_per_s=samples_per_s,
            **self._run.train_step.scalars,
            **noise.scalars,
            **self._skipped,
        )
        self._progress.update(self._run.loader.step, batch.epoch, loss, samples_per_s)

    @property
    def _skipped(self) -> dict[str, float]:
        num_skipped = self._run.train_step.num_skipped
        return {"skipped_steps": num_skipped} if num_skipped else {}

    def _save(self) -> None:
        if self._saved_step != self._run.loader.step:
            self._run.save()
            self._saved_step = self._run.loader.step

    def _evaluate(self) -> None:
        loader = self._run.loader
        self._metrics = self._run.evaluate()
        self._evaluated_step = loader.step
        tagged = {f"test/{name}": value for name, value in self._metrics.items()}
        self._log.write(loader.step, loader.epoch, **tagged)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in self._metrics.items())
        self._progress.note(f"epoch {loader.epoch}: {shown}")

    def report(self, run_dir: Path) -> RunReport:
        """The run's numbers; measures the cost of a sample if the run came to its end."""
        meter, comm = self._meter, self._comm
        local = [meter.samples_per_s, meter.data_share, meter.exchange_share, meter.data_wait_s]
        means = comm.all_reduce(torch.tensor(local, dtype=torch.float64), "mean").tolist()
        samples_per_s, data_share, exchange_share, data_wait_s = means
        flops_per_sample = lone_samples_per_s = None
        if self._interrupted is None and meter.num_samples:
            flops_per_sample, seconds = self._run.cost_of_sample()
            if comm.size > 1:
                wait_s = data_wait_s * comm.size / meter.num_samples
                lone_samples_per_s = 1 / (seconds + wait_s)
        return RunReport(
            run_dir=run_dir,
            num_steps=self._run.loader.step,
            num_epochs=self._run.loader.epoch,
            metrics=self._metrics,
            totals=self._run.totals if self._metrics else {},
            samples_per_s=samples_per_s,
            data_share=data_share,
            exchange_share=exchange_share,
            flops_per_sample=flops_per_sample,
            lone_samples_per_s=lone_samples_per_s,
            noise_scale=self._run.noise.scale.value,
            mean_noise_scale=self._run.noise.mean_scale.value,
            useful_batch=self._run.noise.summary,
            num_skipped=self._run.train_step.num_skipped,
            checkpoint=self._run.last_checkpoint,
            interrupted=self._interrupted,
        )
