"""What a run came to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RunReport"]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The numbers of a run; the same on every worker.

    Attributes:
        run_dir: where everything of the run is.
        num_steps, num_epochs: optimizer steps and whole passes done since the run's start.
        metrics: name -> mean over the test set; empty if the run was interrupted.
        totals: name -> (sum, count) behind `metrics`.
        samples_per_s: samples of all workers together per second of training.
        data_share, exchange_share: mean share of a step that a worker waited for data and
            for the exchange.
        flops_per_sample: floating-point operations of a sample's forward and backward pass.
        lone_samples_per_s: what one worker with this machine to itself would reach; None if
            there is one worker, or if it was not measured.
        noise_scale: samples in a step up to which more of them save steps, at the end of the run;
            None if it was not measured. `useful_batch` says it in words.
        mean_noise_scale: the same over the whole run (its last stage), as `Target` wants it.
        checkpoint: the newest checkpoint.
        num_skipped: steps left out because their gradient was not finite.
        interrupted: number of the signal that ended the run early, or None.
    """

    run_dir: Path
    num_steps: int
    num_epochs: int
    metrics: Mapping[str, float]
    totals: Mapping[str, tuple[float, float]]
    samples_per_s: float
    data_share: float
    exchange_share: float
    flops_per_sample: float | None
    lone_samples_per_s: float | None
    noise_scale: float | None
    mean_noise_scale: float | None
    useful_batch: str | None
    checkpoint: Path | None
    num_skipped: int
    interrupted: int | None
