"""`allstep advise --measure`: runs every policy on the workers at hand."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median_high
from typing import Any

from allstep.cli.advise_flags import MACHINE_FLAGS, powers_of_two, refuse_given
from allstep.cli.advise_subject import Question, recipe_training
from allstep.cli.quantities import parse_counts
from allstep.cli.run_folder import data_parallel
from allstep.cli.workers import run_here
from allstep.comm import Communicator
from allstep.doctor import (
    Measurements,
    Training,
    measure,
    measure_policy,
    measure_workload,
    sleeping_training,
)
from allstep.env import read_launch
from allstep.errors import UsageError
from allstep.files import from_plain
from allstep.plan import POLICIES, PolicySpec, Prediction, TrainingSpec, Workload, predict
from allstep.recipes import recipe_from_plain

_PATIENCE_S = 4 * 3600.0  # of workers that wait for the first steps of a script


def check_flags(known: Namespace) -> None:
    """Raises UsageError if flags describe machines that are to be measured."""
    why = "describes machines, `measure` takes those at hand: leave `{flag}` or `--measure` out."
    refuse_given(known, (*MACHINE_FLAGS, "stragglers"), why)


def worker_counts(known: Namespace, num_local: tuple[int, int]) -> list[int]:
    """The numbers of workers to run, one worker first.

    Args:
        known: the flags.
        num_local: GPUs and cores of this machine.
    """
    asked = None if known.workers is None else parse_counts("workers", known.workers)
    launch = read_launch()
    if launch.launcher != "none":
        if asked not in (None, [launch.size]):
            raise UsageError(
                f"`workers` (={known.workers}) contradicts {launch.launcher}, which started"
                f" {launch.size}: leave `--workers` out."
            )
        return [launch.size]
    num_gpus, num_cores = num_local
    most, what = (num_gpus, "GPUs") if num_gpus else (num_cores, "cores")
    if asked is not None and max(asked) > most:
        raise UsageError(
            f"`workers` (={max(asked)}) exceeds the {most} {what} of this machine, so `--measure`"
            " can't run them: ask for fewer, or start `allstep advise --measure` on all machines"
            " with torchrun."
        )
    return sorted({1, *(asked or powers_of_two(most))})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The measurements of some workers.

    Attributes:
        job: with compute as measured on them.
        measurements: of the workers.
        measured_s: seconds of a step by policy name.
    """

    job: TrainingSpec
    measurements: Measurements
    measured_s: dict[str, float]

    @property
    def predictions(self) -> Sequence[Prediction]:
        """The predictions of every policy that was run, from these measurements alone."""
        policies = [policy for policy in POLICIES if policy.name in self.measured_s]
        return _predict(self.job, self.measurements, policies)


def measure_here(
    ask: Callable[[], Question],
    counts: Sequence[int],
    finish: Callable[[list[Answer]], None],
    start: Callable[..., tuple[int, Any]],
) -> int:
    """Runs the policies on each number of workers, or as one of a launcher's workers.

    Args:
        ask: says what is to be trained; called in one process.
        counts: from `worker_counts`.
        finish: gets the answers, in one process.
        start: runs a body on workers, as `ask_workers` does.

    Returns:
        The exit code; the worker of a launcher doesn't return.
    """
    if read_launch().launcher != "none":
        return run_here(partial(_join, ask=ask, finish=finish))
    question, found = ask(), []
    for num_workers in counts:
        code, plain = start(num_workers, answer_worker, question=question)
        if code:  # a worker, or the launcher, has said why
            return code
        found.append(from_plain(Answer, plain))
    finish(found)
    return 0


def _join(
    comm: Communicator, ask: Callable[[], Question], finish: Callable[[list[Answer]], None]
) -> None:
    plain = answer_worker(comm, ask_first(comm, ask))
    if comm.rank == 0:
        finish([from_plain(Answer, plain)])


def ask_first(comm: Communicator, ask: Callable[[], Question]) -> Question:
    """Rank 0's question, on all workers. Collective.

    A script is run to know it: once, and by one worker.
    """
    usual_s = comm.timeout_s
    comm.set_timeout(_PATIENCE_S)
    question: Question = comm.broadcast_object(ask() if comm.rank == 0 else None)
    comm.set_timeout(usual_s)
    return question


def answer_worker(
    comm: Communicator,
    question: Question,
    *,
    policies: Sequence[PolicySpec] = POLICIES,
    measure: Callable[[Communicator], Measurements] = measure,
    measure_policy: Callable[..., Sequence[float]] = measure_policy,
) -> dict[str, Any]:
    """Measures these workers, predicts every policy from that, and runs each. Collective.

    Args:
        comm: the workers.
        question: what is to be trained.
        policies: to run.
        measure, measure_policy: how.

    Returns:
        An `Answer` as plain data.
    """
    make_training, num_samples, total_samples = _training(comm, question)
    micro = measure_workload(comm, make_training(), num_samples=num_samples)
    job = TrainingSpec(
        micro=micro, global_batch=question["global_batch"], total_samples=total_samples
    )
    measurements = measure(comm)
    measured_s: dict[str, float] = {}
    for prediction in _predict(job, measurements, policies):
        name = prediction.policy.name
        if comm.size == 1 and measured_s:  # nothing is exchanged by any of them
            measured_s[name] = next(iter(measured_s.values()))
            continue
        num_micro_batches = job.num_micro_batches(comm.size)
        seconds = measure_policy(
            comm, make_training, prediction.policy, num_micro_batches=num_micro_batches
        )
        measured_s[name] = median_high(seconds)
    return asdict(Answer(job=job, measurements=measurements, measured_s=measured_s))


def _training(
    comm: Communicator, question: Question
) -> tuple[Callable[[], Training], int, int | None]:
    """A function that makes the training, and the samples of a micro-batch and of all data."""
    if question["recipe"] is not None:
        recipe = data_parallel(recipe_from_plain(question["recipe"]))
        make_training, total_samples = recipe_training(recipe, comm)
        return make_training, recipe.micro_batch, total_samples
    assert question["workload"] is not None
    workload: Workload = from_plain(Workload, question["workload"])
    return partial(sleeping_training, workload), workload.num_samples, None


def _predict(
    job: TrainingSpec, measurements: Measurements, policies: Sequence[PolicySpec]
) -> Sequence[Prediction]:
    cluster = measurements.cluster
    return predict(job, cluster, policies, [cluster.num_workers])
