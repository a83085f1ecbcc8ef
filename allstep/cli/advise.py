"""`allstep advise`: predicts whether scaling pays, how, and up to how many workers."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from allstep.cli.advise_curve import read_growth
from allstep.cli.advise_files import check_files, write_files, write_plain
from allstep.cli.advise_flags import check_numbers, read_machines, read_price
from allstep.cli.advise_measure import Answer, check_flags, measure_here, worker_counts
from allstep.cli.advise_mesh import (
    MeshAnswer,
    check_mesh_flags,
    plain_mesh,
    read_meshes,
    show_mesh,
)
from allstep.cli.advise_output import Advice, show
from allstep.cli.advise_subject import Launch, Subject, is_script, read_command_line, read_subject
from allstep.cli.launch import launch_workers
from allstep.cli.workers import ask_workers
from allstep.device import num_devices
from allstep.env import num_cores, read_launch
from allstep.errors import UsageError
from allstep.plan import (
    POLICIES,
    AccuracyTable,
    Cluster,
    Stragglers,
    Target,
    TrainingSpec,
    measured_accuracy,
    predict,
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
    if recipe is None:  # whose length nothing else tells
        _check_length(known, known.total_samples)
    growth = None if known.curve is None else read_growth(known.curve, recipe)
    subject = read_subject(known, name, rest, launch)
    advise = partial(
        Advice,
        accuracy=measured_accuracy() if accuracy is None else accuracy,
        max_points_lost=known.max_points_lost,
        growth=growth,
        price=price,
    )
    if known.measure:
        check_flags(known)
        local = (num_devices(), num_cores()) if num_local is None else num_local
        counts = worker_counts(known, local)
        finish = partial(_compare, known, advise)
        return measure_here(subject.question, counts, finish, start)
    if known.mesh is not None:
        return _mesh(known, subject, name)
    cluster, counts = read_machines(known)
    job = _with_length(known, subject.job(cluster))
    stragglers = Stragglers(spread=(known.stragglers or 0.0) / 100)
    advice = advise(
        job=job,
        cluster=cluster,
        target=_target(known, job),
        predictions=predict(job, cluster, POLICIES, counts, stragglers),
        assumption=_lent_speed(known, name, cluster),
    )
    _show(known, advice)
    return 0


def _mesh(known: Namespace, subject: Subject, name: str | None) -> int:
    """Predicts meshes, and recommends one of them."""
    cluster, meshes, refused = read_meshes(known, subject)
    job = _with_length(known, subject.job(cluster))
    transformer, states_per_param = subject.model(job.micro)
    found = MeshAnswer(
        cluster=cluster,
        meshes=meshes,
        refused=refused,
        stages_per_worker=known.stages_per_worker or 1,
        job=job,
        transformer=transformer,
        states_per_param=states_per_param,
        memory_gib=known.memory_gib,
        target=_target(known, job),
        lent_speed=_lent_speed(known, name, cluster),
    )
    show_mesh(found, with_timeline=known.timeline)
    write_plain(known, plain_mesh(found))
    return 0


def _lent_speed(known: Namespace, name: str | None, cluster: Cluster) -> str:
    """The model whose speed is assumed where no time is given; "" if one is."""
    if name is not None or known.step_ms is not None:
        return ""
    of = f" of {cluster.workload}" if cluster.workload else ""
    return f"A worker's speed: {cluster.samples_per_s:g} samples/s{of}, from the cluster's file."


def _compare(known: Namespace, advise: Callable[..., Advice], answers: Sequence[Answer]) -> None:
    """Compares every policy's step on the workers at hand with its prediction."""
    last = answers[-1]
    job = _with_length(known, last.job)
    found = [(answer, prediction) for answer in answers for prediction in answer.predictions]
    one = found[0][1]  # efficiency is against one worker that has the machine to itself
    advice = advise(
        job=job,
        cluster=last.measurements.cluster,
        target=_target(known, job),
        predictions=[
            replace(
                prediction,
                total_samples=job.total_samples,
                single_worker_batch=one.single_worker_batch,
                single_worker_samples_per_s=one.single_worker_samples_per_s,
            )
            for _, prediction in found
        ],
        measured_s={(p.policy.name, p.num_workers): a.measured_s[p.policy.name] for a, p in found},
    )
    _show(known, advice)


def _target(known: Namespace, job: TrainingSpec) -> Target | None:
    if known.noise_scale is None:
        return None
    return Target(critical_batch=known.noise_scale, known_batch=job.batch(1))


def _with_length(known: Namespace, job: TrainingSpec) -> TrainingSpec:
    """The training with the length from a flag, if there is one; a price needs a length."""
    job = replace(job, total_samples=known.total_samples or job.total_samples)
    _check_length(known, job.total_samples)
    return job


def _check_length(known: Namespace, total_samples: int | None) -> None:
    if known.price_per_hour is not None and total_samples is None:
        raise UsageError(
            f"`price_per_hour` (={known.price_per_hour:g}) says what a training costs whose length"
            " is known; give `--total-samples`, too."
        )


def _show(known: Namespace, advice: Advice) -> None:
    show(advice, with_timeline=known.timeline)
    write_files(known, advice)
