"""The speed of a run, and its results."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allstep.train.step import Update

_NUM_WARM_UP_STEPS = 2  # allocations, thread pools and first touches of the data


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The results of a run; the same on every worker.

    Attributes:
        run_dir: the run's folder.
        num_copies: copies of the model, each trained on its own samples; fewer than the workers if
            several share a copy.
        num_steps, num_epochs: optimizer steps and whole passes made since the run's start.
        metrics: name -> mean over the test set; empty if the run was interrupted.
        totals: name -> (sum, count) behind `metrics`.
        samples_per_s: samples of all workers together per second of training; 0 if no step was
            left to train.
        num_timed_steps: steps from which that was measured; 0 if there were only the first two,
            which take longer than others.
        data_share, exchange_share: mean share of a step that a worker waited for data and
            for the exchange.
        flops_per_sample: floating-point operations of a sample's forward and backward pass; None if
            they were not measured, or none can be counted.
        single_worker_samples_per_s: the speed of a single worker that has this machine to itself;
            None if there is one worker, or if it was not measured.
        noise_scale: batch size, in samples, up to which larger batches save steps, at the end of
            the run; None if it was not measured. `useful_batch` says it in words.
        mean_noise_scale: the same over the whole run (its last stage), for `Target`.
        checkpoint: the newest checkpoint.
        best_checkpoint: the best checkpoint by `best_metric`; None if there is none.
        best_step, best_value: optimizer steps made and the metric's value at the best evaluation.
        stopped_early: whether `patience` ended the run before its last epoch.
        num_skipped: steps left out because their gradient was not finite.
        shares: which workers have fewer micro-batches and why; None if all have the same.
        interrupted: number of the signal that ended the run early, or None.
    """

    run_dir: Path
    num_copies: int
    num_steps: int
    num_epochs: int
    metrics: Mapping[str, float]
    totals: Mapping[str, tuple[float, float]]
    samples_per_s: float
    num_timed_steps: int
    data_share: float
    exchange_share: float
    flops_per_sample: float | None
    single_worker_samples_per_s: float | None
    noise_scale: float | None
    mean_noise_scale: float | None
    useful_batch: str | None
    checkpoint: Path | None
    best_checkpoint: Path | None
    best_step: int | None
    best_value: float | None
    stopped_early: bool
    num_skipped: int
    shares: str | None
    interrupted: int | None


class Meter:
    """Adds up the seconds of training steps; evaluation and checkpoints don't count.

    The first steps are left out as soon as later ones exist.

    Attributes:
        num_samples: samples of all workers together.
        step_s, data_wait_s, exchange_s: seconds of the steps, and those among them that this
            worker waited for data and for the exchange.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._reset()

    def _reset(self) -> None:
        self.num_samples = 0
        self.step_s = self.data_wait_s = self.exchange_s = 0.0

    def add(self, update: Update, step_s: float) -> None:
        """Adds a step that took `step_s` seconds, including the wait for its data."""
        if self._num_steps == _NUM_WARM_UP_STEPS:
            self._reset()
        self._num_steps += 1
        self.num_samples += update.num_samples
        self.step_s += step_s
        self.data_wait_s += update.data_wait_s
        self.exchange_s += update.exchange_s

    @property
    def num_timed_steps(self) -> int:
        """Number of steps after the first two."""
        return max(0, self._num_steps - _NUM_WARM_UP_STEPS)

    @property
    def samples_per_s(self) -> float:
        """Samples of all workers together per second of training."""
        return self.num_samples / self.step_s if self.step_s else 0.0

    @property
    def data_share(self) -> float:
        """Share of the steps' time that this worker waited for data."""
        return self.data_wait_s / self.step_s if self.step_s else 0.0

    @property
    def exchange_share(self) -> float:
        """Share of the steps' time that this worker waited for the exchange."""
        return self.exchange_s / self.step_s if self.step_s else 0.0
