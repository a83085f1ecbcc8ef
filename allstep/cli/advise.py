"""`allstep advise`: whether scaling pays, how, and up to how many workers; before you do it."""

from argparse import Namespace
from collections.abc import Callable

from allstep.cli.advise_flags import make_parser, read_machines
from allstep.cli.advise_output import Advice, check_plot, show, write_json, write_plot
from allstep.cli.quantities import parse_count
from allstep.errors import UsageError
from allstep.plan.accuracy import measured_accuracy
from allstep.plan.cluster import Cluster, check_positive
from allstep.plan.job import Job
from allstep.plan.policy import POLICIES
from allstep.plan.recommend import recommend
from allstep.plan.scaling import predict
from allstep.plan.stragglers import Stragglers
from allstep.plan.time_to_target import Target
from allstep.plan.workload import Workload

__all__ = ["run"]

_MICRO_BATCH = 32


def run(arguments: list[str]) -> int:
    """Predicts the usual policies and recommends one, or none."""
    if arguments and not arguments[0].startswith("-"):
        known, recipe_flags = make_parser().parse_known_args(arguments[1:])
        make_job = _recipe_job(known, arguments[0], recipe_flags)
    else:
        known = make_parser().parse_args(arguments)
        make_job = lambda cluster: _bare_job(known, cluster)  # noqa: E731
    if known.plot is not None:
        check_plot()
    advice = _advise(known, make_job)
    if known.json is not None:
        write_json(known.json, advice)
    if known.plot is not None:
        write_plot(known.plot, advice)
    show(advice, with_timeline=known.timeline)
    return 0


def _advise(known: Namespace, make_job: Callable[[Cluster], Job]) -> Advice:
    cluster, counts = read_machines(known)
    stragglers = Stragglers(spread=known.stragglers / 100)
    noise_scale = None
    if known.noise_scale is not None:
        noise_scale = parse_count("noise_scale", known.noise_scale)
    job = make_job(cluster)
    target = None
    if noise_scale is not None:
        target = Target(critical_batch=noise_scale, known_batch=job.batch(1))
    predictions = predict(job, cluster, POLICIES, counts, stragglers)
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
    )


def _bare_job(known: Namespace, cluster: Cluster) -> Job:
    if known.params is None:
        raise UsageError(
            "`params` is missing: how many parameters the model has, such as `--params 25M`;"
            " or name a recipe, `allstep advise digits --link 10gbit`."
        )
    micro_batch = _MICRO_BATCH if known.micro_batch is None else known.micro_batch
    if known.step_ms is not None:
        check_positive("step_ms", known.step_ms, "110 is a tenth of a second")
        step_s = known.step_ms / 1000
    elif cluster.samples_per_s is not None:
        step_s = micro_batch / cluster.samples_per_s
    else:
        raise UsageError(
            "`step_ms` is missing: how long one worker takes for a micro-batch, forward and"
            " backward, such as `--step-ms 110`."
        )
    micro = Workload.from_step(
        num_params=parse_count("params", known.params), step_s=step_s, num_samples=micro_batch
    )
    return Job(micro=micro, global_batch=known.global_batch)


def _recipe_job(known: Namespace, name: str, flags: list[str]) -> Callable[[Cluster], Job]:
    """Reads the recipe now, so that mistakes show at once; measures when called."""
    from allstep.cli.advise_recipe import measure, read_recipe_flags

    for field in ("params", "step_ms"):
        if getattr(known, field) is not None:
            raise UsageError(
                f"`{field}` (={getattr(known, field)}) is measured for a recipe: leave"
                f" `--{field.replace('_', '-')}` out, or leave `{name}` out."
            )
    for field in ("micro_batch", "global_batch"):
        if getattr(known, field) is not None:
            flags = [*flags, f"--{field.replace('_', '-')}", str(getattr(known, field))]
    recipe = read_recipe_flags(name, flags)
    return lambda cluster: Job(micro=measure(recipe), global_batch=recipe.global_batch)
