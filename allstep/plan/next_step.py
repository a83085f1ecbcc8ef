"""Advises on one next step, from the figures of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

# Above these shares of a step, the advice is about the wait and not about compute.
DATA_SHARE = 0.20
EXCHANGE_SHARE = 0.30
# The same for the share of the workers' time lost because micro-batches don't divide evenly.
IDLE_SHARE = 0.20
# Below this share of the GEMM peak, small kernels and overhead dominate.
LOW_MFU = 0.30
# Speed-up per worker above which more workers are advised, and below which fewer are.
GOOD_EFFICIENCY = 0.8
POOR_EFFICIENCY = 0.6


@dataclass(frozen=True, kw_only=True)
class RunNumbers:
    """The input of `next_step`; rates and shares are those of a run's report.

    Args:
        workers: number of workers.
        num_copies: copies of the model among which a step's micro-batches are divided.
        samples_per_s: throughput of all workers together.
        num_timed_steps: number of steps in which it was measured; if 0, it means little.
        single_worker_samples_per_s: throughput of one worker with the machine to itself; None if
            it is unknown.
        data_share, exchange_share: share of a step spent waiting for data, and for the exchange.
        mfu: share of the machine's measured matrix-multiply peak; None if it is unknown.
        global_batch, micro_batch: samples of a step, and of one pass through the model.
        loader_workers: processes per worker that read samples.
        num_cores, num_gpus: cores and GPUs of the machine.
        resume_command: command that continues the run if it was interrupted, else None.
    """

    workers: int
    num_copies: int
    samples_per_s: float
    num_timed_steps: int
    single_worker_samples_per_s: float | None
    data_share: float
    exchange_share: float
    mfu: float | None
    global_batch: int
    micro_batch: int
    loader_workers: int
    num_cores: int
    num_gpus: int
    resume_command: str | None = None

    @property
    def speed_up(self) -> float | None:
        """How many times as fast as one worker the run is; None if that is unknown."""
        if self.workers == 1 or not self.single_worker_samples_per_s:
            return None
        return self.samples_per_s / self.single_worker_samples_per_s

    @property
    def copy_size(self) -> int:
        """Workers that share a copy of the model."""
        return self.workers // self.num_copies

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a full step, over all workers."""
        return ceil(self.global_batch / self.micro_batch)


def next_step(numbers: RunNumbers) -> str:
    """The one thing to do next: the first case that applies, in order of cost.

    Args:
        numbers: the figures of a finished or interrupted run.

    Returns:
        A sentence for the end of the run's summary.

    >>> next_step(RunNumbers(
    ...     workers=2, num_copies=2, samples_per_s=600, num_timed_steps=90,
    ...     single_worker_samples_per_s=1000, data_share=0.0, exchange_share=0.6, mfu=0.1,
    ...     global_batch=128, micro_batch=32, loader_workers=0, num_cores=2, num_gpus=0))
    "2 workers are slower than 1 here (0.6x): don't; use `--workers 1`."
    """
    cases: tuple[Callable[[RunNumbers], str | None], ...] = (
        _interrupted,
        _hardly_timed,
        _slower_than_one,
        _waits_for_data,
        _uneven_shares,
        _waits_for_exchange,
        _idle_machine,
        _poor_speed_up,
        _low_mfu,
    )
    found = (advice for case in cases if (advice := case(numbers)) is not None)
    return next(found, _all_well(numbers))


def _interrupted(numbers: RunNumbers) -> str | None:
    if numbers.resume_command is None:
        return None
    return f"the run was interrupted; continue it with `{numbers.resume_command}`."


def _hardly_timed(numbers: RunNumbers) -> str | None:
    if numbers.num_timed_steps:
        return None
    return "the run is done; too few steps were left in this part of it to judge its speed by."


def _slower_than_one(numbers: RunNumbers) -> str | None:
    speed_up = numbers.speed_up
    if speed_up is None or speed_up >= 1:
        return None
    return (
        f"{numbers.workers} workers are slower than 1 here ({_times(speed_up)}): don't;"
        " use `--workers 1`."
    )


def _waits_for_data(numbers: RunNumbers) -> str | None:
    if numbers.data_share <= DATA_SHARE:
        return None
    share = f"{numbers.data_share:.0%} of a step is spent waiting for data"
    if numbers.loader_workers * numbers.workers >= numbers.num_cores:
        return (
            f"{share} and every core has a loader already:"
            " make samples cheaper to read (smaller files, faster disk)."
        )
    return f"{share}: try `--loader-workers {max(1, 2 * numbers.loader_workers)}`."


def _uneven_shares(numbers: RunNumbers) -> str | None:
    num, copies = numbers.num_micro_batches, numbers.num_copies
    most = ceil(num / copies)
    idle = 1 - num / (copies * most)
    if idle <= IDLE_SHARE:
        return None
    global_batch = copies * most * numbers.micro_batch
    sharers = "workers" if copies == numbers.workers else "copies of the model"
    return (
        f"a step has {num} micro-batches for {copies} {sharers}, which idle {idle:.0%} of it:"
        f" try `--global-batch {global_batch}` or a smaller `--micro-batch`."
    )


def _waits_for_exchange(numbers: RunNumbers) -> str | None:
    if numbers.exchange_share <= EXCHANGE_SHARE:
        return None
    return (
        f"{numbers.exchange_share:.0%} of a step is spent waiting for the exchange:"
        f" try `--global-batch {2 * numbers.global_batch}` (more compute for each exchange)"
        " or fewer workers."
    )


def _idle_machine(numbers: RunNumbers) -> str | None:
    workers, copy_size = numbers.workers, numbers.copy_size
    usable = numbers.num_gpus // copy_size * copy_size
    if workers < usable:
        return f"{numbers.num_gpus - workers} GPUs idle: try `--workers {usable}`."
    if numbers.num_gpus or workers >= numbers.num_cores:
        return None
    # The threads of one worker may use all cores, but with small kernels most of them wait.
    small_kernels = workers == 1 and numbers.mfu is not None and numbers.mfu < LOW_MFU
    scales = (numbers.speed_up or 0) / workers >= GOOD_EFFICIENCY
    most_copies = min(2 * numbers.num_copies, numbers.num_micro_batches)
    more = copy_size * min(most_copies, numbers.num_cores // copy_size)
    if not (small_kernels or scales) or more <= workers:
        return None
    reason = (
        f"1 worker reaches only {numbers.mfu:.0%} of the machine's peak"
        if small_kernels
        else f"{workers} workers give {_times(numbers.speed_up or 0)} and cores are left"
    )
    return f"{reason}: try `--workers {more}`."


def _poor_speed_up(numbers: RunNumbers) -> str | None:
    speed_up = numbers.speed_up
    if speed_up is None or speed_up / numbers.workers >= POOR_EFFICIENCY:
        return None
    fewer = max(1, numbers.workers // 2)
    return (
        f"{numbers.workers} workers give only {_times(speed_up)}:"
        f" try `--workers {fewer}`, which may do nearly as much."
    )


def _low_mfu(numbers: RunNumbers) -> str | None:
    if numbers.mfu is None or numbers.mfu >= LOW_MFU:
        return None
    cures = "`--precision bfloat16` or `--compile`" if numbers.num_gpus else "`--compile`"
    return (
        f"the model reaches {numbers.mfu:.0%} of the machine's peak: try {cures},"
        " or a larger `--micro-batch`."
    )


def _all_well(numbers: RunNumbers) -> str:
    speed_up = numbers.speed_up
    if speed_up is not None:
        return f"{numbers.workers} workers give {_times(speed_up)}; scaling pays."
    return "nothing stands out: train longer, or on more machines."


def _times(ratio: float) -> str:
    """A ratio to one decimal, or to two if it would round to 1.0.

    >>> _times(0.97), _times(1.8)
    ('0.97x', '1.8x')
    """
    return f"{ratio:.2f}x" if round(ratio, 1) == 1.0 else f"{ratio:.1f}x"
