"""A run's summary on one screen, with one next step."""

from dataclasses import dataclass

import torch

from allstep.cli.rows import print_rows
from allstep.cli.run_folder import resume_command
from allstep.comm import Communicator
from allstep.device import num_devices
from allstep.doctor import measure_gemm_flops
from allstep.env import num_cores
from allstep.plan import RunNumbers, next_step
from allstep.recipes import Recipe
from allstep.train import RunReport


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Facts for the summary beside the report.

    Attributes:
        workers: how many trained together.
        gemm_flops_per_s: matrix-multiply peak of all workers together, as measured now.
        mfu: share of it that training reached.
        next_step: one piece of advice.
    """

    workers: int
    gemm_flops_per_s: float | None
    mfu: float | None
    next_step: str


def summarize(report: RunReport, recipe: Recipe, comm: Communicator) -> Summary:
    """Measures the machine's peak and draws the conclusions. All workers call it."""
    peak = mfu = None
    if report.flops_per_sample is not None:
        peak = measure_gemm_flops(comm, getattr(torch, recipe.precision))
        mfu = report.flops_per_sample * report.samples_per_s / peak
    resume = resume_command(report.run_dir, comm.size)
    numbers = RunNumbers(
        workers=comm.size,
        num_copies=report.num_copies,
        samples_per_s=report.samples_per_s,
        num_timed_steps=report.num_timed_steps,
        single_worker_samples_per_s=report.single_worker_samples_per_s,
        data_share=report.data_share,
        exchange_share=report.exchange_share,
        mfu=mfu,
        global_batch=recipe.global_batch,
        micro_batch=recipe.micro_batch,
        loader_workers=recipe.loader_workers,
        num_cores=num_cores(),
        num_gpus=num_devices(),
        resume_command=resume if report.interrupted else None,
    )
    return Summary(workers=comm.size, gemm_flops_per_s=peak, mfu=mfu, next_step=next_step(numbers))


def show(report: RunReport, summary: Summary) -> None:
    """Prints the run's numbers: a table on a terminal, plain lines elsewhere."""
    rows = [(name, _metric(report, name)) for name in report.metrics]
    if report.samples_per_s:
        plural = "s" if summary.workers > 1 else ""
        rows.append(
            ("speed", f"{report.samples_per_s:,.0f} samples/s on {summary.workers} worker{plural}")
        )
    if summary.mfu is not None and summary.gemm_flops_per_s is not None:
        peak = f"{summary.gemm_flops_per_s / 1e9:,.0f} GFLOP/s"
        rows.append(("MFU", f"{summary.mfu:.1%} of the measured matrix-multiply peak ({peak})"))
    elif report.samples_per_s and report.interrupted is None:
        rows.append(("MFU", "not known: the model's operations can't be counted"))
    if report.samples_per_s:
        waits = f"{report.data_share:.1%} for data, {report.exchange_share:.1%} for the exchange"
        rows.append(("waiting", waits))
    if report.shares is not None:
        rows.append(("shares", report.shares))
    if report.useful_batch is not None:
        rows.append(("batch", report.useful_batch))
    if report.num_skipped:
        rows.append(("skipped", f"{report.num_skipped} steps, whose gradient was not finite"))
    if report.checkpoint is not None:
        rows.append(("checkpoint", str(report.checkpoint)))
    if report.best_checkpoint is not None:
        best = f"{report.best_value:.4f} at step {report.best_step}: {report.best_checkpoint}"
        rows.append(("best", best))
    if report.stopped_early:
        rows.append(("stopped", f"after {report.num_epochs} epochs, without a gain for `patience`"))
    rows.append(("run", str(report.run_dir)))
    rows.append(("next", summary.next_step))
    print_rows(rows)


def _metric(report: RunReport, name: str) -> str:
    total, count = report.totals[name]
    if total.is_integer() and 0 <= total <= count:  # a count of right answers
        return f"{report.metrics[name]:.2%} ({total:.0f} of {count:.0f})"
    return f"{report.metrics[name]:.4f}"
