"""Trains a task: on a fixed set of workers that stop together, or on elastic ones."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from allstep.comm import Communicator
from allstep.comm.membership import Membership
from allstep.env import read_launch
from allstep.errors import CommunicationError, PeerLostError
from allstep.train.elastic import (
    LOST,
    StepCommit,
    WorkersWaitError,
    admit,
    check_backend,
    check_elastic,
    check_whole,
    go_on,
    training_of,
)
from allstep.train.loop import Loop
from allstep.train.metrics import Logger
from allstep.train.options import TrainOptions
from allstep.train.report import RunReport
from allstep.train.run import Run
from allstep.train.stop import Interrupts, StepStopAgreement
from allstep.train.task import Task


def fit(
    task: Task,
    options: TrainOptions,
    comm: Communicator,
    run_dir: Path | str,
    *,
    resume: bool | Literal["auto"] = False,
    elastic: bool = False,
    loggers: Sequence[Logger] = (),
) -> RunReport:
    """Trains a task on the workers of `comm`; the result does not depend on their number.

    SIGINT and SIGTERM end the run after the current step with a checkpoint. With `elastic` the
    training continues in memory when a worker is lost, and others may join; `comm` then holds the
    present workers. See [Note: elastic training].

    Args:
        task: model, data, loss, metrics, optimizer.
        options: epochs, batches, precision, what is kept on disk.
        comm: the workers; each of them must call this.
        run_dir: folder for checkpoints and metrics; made if missing.
        resume: continue from the folder's newest complete checkpoint; "auto" starts a new run if
            the folder has none.
        elastic: continue when workers are lost; needs exact sums, and a launcher that lets the
            others live, such as `allstep train --elastic`.
        loggers: called as `logger(scalars, step=step)` with each line of the log, on rank 0 only,
            which waits for them: `wandb.log` or `mlflow.log_metrics`. An exception in one becomes a
            warning.

    Returns:
        The run's report, the same on every worker.

    Raises:
        UsageError: if options or data don't fit, if the metrics lack `best_metric`, if another
            process trains in the folder, or if it holds another run.
        CheckpointError: if there is nothing to resume, or if it was saved for another model.

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
    if elastic:
        check_elastic(options)
        check_backend(comm)
        check_whole(
            task.model, "`elastic` (=True): `task.model", "leave it out, and resume a checkpoint"
        )
        membership = Membership(read_launch(), grace_s=comm.timeout_s)
        return fit_elastic(task, options, comm, run_dir, membership, resume=resume, loggers=loggers)
    with closing(Run(task, options, comm)) as run, Interrupts() as interrupts:
        loop = _loop(run, options, comm, run_dir, interrupts, loggers)
        loop.run(resume=resume)
        return _report(run, loop, comm, run_dir)


def fit_elastic(
    task: Task,
    options: TrainOptions,
    comm: Communicator,
    run_dir: Path,
    membership: Membership,
    *,
    resume: bool | Literal["auto"] = False,
    loggers: Sequence[Logger] = (),
) -> RunReport:
    """`fit`, by one generation of workers after the other. [Note: elastic training]"""
    admit(comm, membership, training_of(task, options))
    state: Mapping[str, Any] | None = None
    if membership.waits:
        state = go_on(comm, membership, None)
        if state is None:
            raise PeerLostError(
                "All workers that had the training's state were lost before this one had joined."
                " Resume the run from its newest checkpoint."
            )
    with Interrupts() as interrupts:
        while True:
            loop: Loop | None = None
            try:
                stop = StepStopAgreement(interrupts)
                elastic = StepCommit(comm, membership, stop)
                with closing(Run(task, options, comm, elastic)) as run, _aborted(comm):
                    loop = _loop(run, options, comm, run_dir, interrupts, loggers, stop)
                    loop.run(resume=resume, state=state)
                    report = _report(run, loop, comm, run_dir)
            except (*LOST, WorkersWaitError):
                if loop is not None and loop.has_begun:
                    state = {**run.state_at_step_start(), **loop.own_state()}
            else:
                membership.end(128 + report.interrupted if report.interrupted else 0)
                return report
            for p in task.model.parameters():
                p.grad = None
            state = go_on(comm, membership, state)


@contextmanager
def _aborted(comm: Communicator) -> Iterator[None]:
    """Aborts the process group when a call has failed, before pending work is destroyed."""
    try:
        yield
    except CommunicationError:
        comm.abort()
        raise


def _loop(
    run: Run,
    options: TrainOptions,
    comm: Communicator,
    run_dir: Path,
    interrupts: Interrupts,
    loggers: Sequence[Logger],
    agreement: StepStopAgreement | None = None,
) -> Loop:
    best = options.best
    if best is not None:
        best.check_names(run.metric_names())
    return Loop(
        run,
        comm,
        run_dir,
        interrupts,
        epochs=options.epochs,
        log_every_steps=options.log_every_steps,
        checkpoint_every_steps=options.checkpoint_every_steps,
        evaluate_every_epochs=options.evaluate_every_epochs,
        keep_checkpoints=options.keep_checkpoints,
        best=best,
        loggers=loggers,
        has_global_losses=run.is_elastic,
        data_axis=run.data_axis,
        agreement=agreement,
    )


def _report(run: Run, loop: Loop, comm: Communicator, run_dir: Path) -> RunReport:
    """The run's report; measures the cost of a sample if the run was completed."""
    meter = loop.meter
    local = [meter.samples_per_s, meter.data_share, meter.exchange_share, meter.data_wait_s]
    means = comm.all_reduce(torch.tensor(local, dtype=torch.float64), "mean").tolist()
    samples_per_s, data_share, exchange_share, data_wait_s = means
    flops_per_sample = single_worker_samples_per_s = None
    cost = run.cost_of_sample() if loop.interrupted is None and meter.num_samples else None
    if cost is not None:
        flops_per_sample, seconds = cost
        if comm.size > 1:
            wait_s = data_wait_s * comm.size / meter.num_samples
            single_worker_samples_per_s = 1 / (seconds + wait_s)
    return RunReport(
        run_dir=run_dir,
        num_copies=run.data_axis.size,
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
        best_checkpoint=loop.best_checkpoint,
        best_step=loop.best.step if loop.best else None,
        best_value=loop.best.value if loop.best else None,
        stopped_early=loop.stopped_early,
        interrupted=loop.interrupted,
    )
