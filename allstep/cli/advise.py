"""`allstep advise`: whether scaling pays, how, and up to how many workers; before you do it."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from allstep.cli.advise_files import check_files, write_files
from allstep.cli.advise_flags import check_numbers, read_machines
from allstep.cli.advise_output import Advice, show
from allstep.cli.advise_subject import Subject, read_command_line, read_subject
from allstep.cli.quantities import parse_count
from allstep.env import read_launch
from allstep.plan import (
    POLICIES,
    Cluster,
    Prediction,
    Stragglers,
    Target,
    TrainingSpec,
    measured_accuracy,
    predict,
    recommend,
)

if TYPE_CHECKING:
    from allstep.cli.advise_worker import Answer

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Predicts the usual policies and recommends one, or none."""
    name, known, rest = read_command_line(arguments)
    check_numbers(known)
    if not known.measure or read_launch().rank == 0:  # of several, one writes
        check_files(known)
    subject = read_subject(known, name, rest)
    if known.measure:
        return _measure(known, subject)
    cluster, counts = read_machines(known)
    stragglers = Stragglers(spread=known.stragglers / 100)
    noise_scale, total_samples = _count(known, "noise_scale"), _count(known, "total_samples")
    job = _with_length(subject.job(cluster), total_samples)
    predictions = predict(job, cluster, POLICIES, counts, stragglers)
    advice = _advise(known, job, cluster, predictions, noise_scale)
    if name is None and known.step_ms is None:
        advice = replace(advice, assumption=_lent_speed(cluster))
    _show(known, advice)
    return 0


def _lent_speed(cluster: Cluster) -> str:
    """What a model whose time isn't given is taken to be like."""
    of = f" of {cluster.workload}" if cluster.workload else ""
    return f"A worker's speed: {cluster.samples_per_s:g} samples/s{of}, from the cluster's file."


def _measure(known: Namespace, subject: Subject) -> int:
    """Runs every policy on the workers at hand, and puts what they took beside the prediction."""
    from allstep.cli.advise_measure import check_flags, measure_here, worker_counts

    check_flags(known)
    counts = worker_counts(known)
    noise_scale, total_samples = _count(known, "noise_scale"), _count(known, "total_samples")

    def finish(answers: Sequence["Answer"]) -> None:
        last = answers[-1]
        job = _with_length(last.job, total_samples)
        predictions = [
            replace(p, total_samples=job.total_samples)
            for found in answers
            for p in found.predictions
        ]
        measured_s = {
            (p.policy.name, p.num_workers): found.measured_s[p.policy.name]
            for found in answers
            for p in found.predictions
        }
        cluster = last.measurements.cluster()
        _show(known, _advise(known, job, cluster, predictions, noise_scale, measured_s))

    return measure_here(subject.question, counts, finish)


def _advise(
    known: Namespace,
    job: TrainingSpec,
    cluster: Cluster,
    predictions: Sequence[Prediction],
    noise_scale: int | None,
    measured_s: Mapping[tuple[str, int], float] | None = None,
) -> Advice:
    target = None
    if noise_scale is not None:
        target = Target(critical_batch=noise_scale, known_batch=job.batch(1))
    accuracy = measured_accuracy()
    return Advice(
        job=job,
        cluster=cluster,
        target=target,
        accuracy=accuracy,
        predictions=predictions,
        recommendation=recommend(
            predictions, accuracy, max_points_lost=known.max_points_lost, target=target
        ),
        measured_s=measured_s or {},
    )


def _with_length(job: TrainingSpec, total_samples: int | None) -> TrainingSpec:
    """The training with the length that a flag gives it, if one does."""
    return job if total_samples is None else replace(job, total_samples=total_samples)


def _count(known: Namespace, name: str) -> int | None:
    text = getattr(known, name)
    return None if text is None else parse_count(name, text)


def _show(known: Namespace, advice: Advice) -> None:
    show(advice, with_timeline=known.timeline)
    write_files(known, advice)
