"""`allstep advise`: whether scaling pays, how, and up to how many workers; before you do it."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from allstep.cli.advise_curve import read_growth
from allstep.cli.advise_files import check_files, write_files, write_plain
from allstep.cli.advise_flags import check_numbers, read_machines, read_price
from allstep.cli.advise_measure import Answer, check_flags, measure_here, worker_counts
from allstep.cli.advise_mesh import (
    answer,
    check_mesh_flags,
    plain_mesh,
    read_question,
    show_mesh,
)
from allstep.cli.advise_output import Advice, show
from allstep.cli.advise_subject import Launch, Subject, is_script, read_command_line, read_subject
from allstep.cli.launch import launch_workers
from allstep.cli.quantities import parse_count
from allstep.cli.workers import ask_workers
from allstep.device import num_devices
from allstep.env import num_cores, read_launch
from allstep.errors import UsageError
from allstep.plan import (
    POLICIES,
    AccuracyTable,
    Cluster,
    Growth,
    Prediction,
    Price,
    Stragglers,
    Target,
    TrainingSpec,
    measured_accuracy,
    predict,
    recommend,
)


def run(
    arguments: list[str],
    *,
    launch: Launch = launch_workers,
    start: Callable[..., tuple[int, Any]] = ask_workers,
    accuracy: AccuracyTable | None = None,
    num_local: tuple[int, int] | None = None,
) -> int:
    """Predicts the usual policies and recommends one, or none.

    Args:
        arguments: what follows `allstep advise`.
        launch, start: run a script's worker, and workers of `--measure`.
        accuracy: what policies cost; None means as measured.
        num_local: GPUs and cores of this machine; None means as they are.
    """
    name, known, rest = read_command_line(arguments)
    check_numbers(known)
    check_mesh_flags(known)
    if not known.measure or read_launch().rank == 0:  # of several, one writes
        check_files(known)
    recipe = None if name is None or is_script(name) else name
    price = read_price(known)
    growth = None if known.curve is None else read_growth(known.curve, recipe)
    subject = read_subject(known, name, rest, launch)
    table = measured_accuracy() if accuracy is None else accuracy
    if known.measure:
        check_flags(known)
        local = (num_devices(), num_cores()) if num_local is None else num_local
        counts = worker_counts(known, local)
        return _measure(known, subject, table, counts, growth, price, start)
    if known.mesh is not None:
        return _mesh(known, subject, name)
    cluster, counts = read_machines(known)
    stragglers = Stragglers(spread=known.stragglers / 100)
    noise_scale, total_samples = _count(known, "noise_scale"), _count(known, "total_samples")
    job = _with_length(subject.job(cluster), total_samples)
    _check_length(job, price)
    predictions = predict(job, cluster, POLICIES, counts, stragglers)
    advice = _advise(known, job, cluster, predictions, table, noise_scale)
    advice = replace(advice, assumption=_lent_speed(known, name, cluster))
    _show(known, replace(advice, growth=growth, price=price))
    return 0


def _mesh(known: Namespace, subject: Subject, name: str | None) -> int:
    """Predicts meshes, and recommends one of them."""
    question = read_question(known, subject)
    job = _with_length(subject.job(question.cluster), _count(known, "total_samples"))
    target = _target(job, _count(known, "noise_scale"))
    lent_speed = _lent_speed(known, name, question.cluster)
    found = answer(known, question, job, subject.model(job.micro), target, lent_speed)
    show_mesh(found, with_timeline=known.timeline)
    write_plain(known, plain_mesh(found))
    return 0


def _lent_speed(known: Namespace, name: str | None, cluster: Cluster) -> str:
    """What a model whose time isn't given is taken to be like; "" if it is."""
    if name is not None or known.step_ms is not None:
        return ""
    of = f" of {cluster.workload}" if cluster.workload else ""
    return f"A worker's speed: {cluster.samples_per_s:g} samples/s{of}, from the cluster's file."


def _measure(
    known: Namespace,
    subject: Subject,
    table: AccuracyTable,
    counts: Sequence[int],
    growth: Growth | None,
    price: Price | None,
    start: Callable[..., tuple[int, Any]],
) -> int:
    """Runs every policy on the workers at hand, and puts what they took beside the prediction."""
    noise_scale, total_samples = _count(known, "noise_scale"), _count(known, "total_samples")

    def finish(answers: Sequence[Answer]) -> None:
        last = answers[-1]
        job = _with_length(last.job, total_samples)
        _check_length(job, price)
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
        cluster = last.measurements.cluster
        advice = _advise(known, job, cluster, predictions, table, noise_scale, measured_s)
        _show(known, replace(advice, growth=growth, price=price))

    return measure_here(subject.question, counts, finish, start)


def _advise(
    known: Namespace,
    job: TrainingSpec,
    cluster: Cluster,
    predictions: Sequence[Prediction],
    accuracy: AccuracyTable,
    noise_scale: int | None,
    measured_s: Mapping[tuple[str, int], float] | None = None,
) -> Advice:
    target = _target(job, noise_scale)
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


def _target(job: TrainingSpec, noise_scale: int | None) -> Target | None:
    if noise_scale is None:
        return None
    return Target(critical_batch=noise_scale, known_batch=job.batch(1))


def _with_length(job: TrainingSpec, total_samples: int | None) -> TrainingSpec:
    """The training with the length that a flag gives it, if one does."""
    return job if total_samples is None else replace(job, total_samples=total_samples)


def _check_length(job: TrainingSpec, price: Price | None) -> None:
    if price is not None and job.total_samples is None:
        raise UsageError(
            f"`price_per_hour` (={price.per_hour:g}) says what a training costs whose length is"
            " known; give `--total-samples`, too."
        )


def _count(known: Namespace, name: str) -> int | None:
    text = getattr(known, name)
    return None if text is None else parse_count(name, text)


def _show(known: Namespace, advice: Advice) -> None:
    show(advice, with_timeline=known.timeline)
    write_files(known, advice)
