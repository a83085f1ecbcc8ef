"""The reasons why N workers are not N times as fast as one.

num_workers / speed-up = product of the bottlenecks' factors
"""

from dataclasses import dataclass

from allstep.plan.predict import Prediction
from allstep.plan.time_to_target import Target


@dataclass(frozen=True)
class Bottleneck:
    """One reason why workers are slower than they could be.

    Attributes:
        factor: how many times as fast the workers would be without it; 1 if it costs nothing.
        reason: the reason in words.
        cure: what would reduce it.
    """

    factor: float
    reason: str
    cure: str


def bottlenecks(prediction: Prediction, target: Target | None = None) -> list[Bottleneck]:
    """All bottlenecks of a prediction, always in the same order.

    Args:
        prediction: a prediction for some number of workers.
        target: a target, to count the samples that it takes, and not only samples per second.
    """
    found = [
        _exchange(prediction),
        _idle_workers(prediction),
        _slower_compute(prediction),
        _stragglers(prediction),
    ]
    if prediction.mesh.copy_size > 1:
        found.append(_activations(prediction))
    if prediction.mesh.pipeline > 1:
        found.append(_bubble(prediction))
    if prediction.mesh.shard > 1:
        found.append(_sharding(prediction))
    return found if target is None else [*found, _larger_batch(prediction, target)]


def largest_bottleneck(prediction: Prediction, target: Target | None = None) -> Bottleneck:
    """The bottleneck that costs most."""
    return max(bottlenecks(prediction, target), key=lambda bottleneck: bottleneck.factor)


def growing_bottleneck(
    few: Prediction, many: Prediction, target: Target | None = None
) -> Bottleneck:
    """The bottleneck whose cost grows most from `few` workers to `many`."""
    pairs = zip(bottlenecks(few, target), bottlenecks(many, target), strict=True)
    return max(pairs, key=lambda pair: pair[1].factor / pair[0].factor)[1]


def _exchange(prediction: Prediction) -> Bottleneck:
    report = prediction.report
    return Bottleneck(
        (report.step_s - report.straggler_s) / report.compute_s,
        f"the exchange takes {report.exchange_share:.0%} of a step",
        "a faster link, or more compute for each exchange",
    )


def _idle_workers(prediction: Prediction) -> Bottleneck:
    num, idle = prediction.num_micro_batches, prediction.idle_share
    sharers = f"{prediction.num_workers:,} workers"
    if prediction.mesh.copy_size > 1:
        sharers = f"{prediction.mesh.data:,} copies of the model"
    return Bottleneck(
        1 / (1 - idle),
        f"a step has {num:,} micro-batch{'es' * (num > 1)} for {sharers},"
        f" which idle {idle:.0%} of it",
        "a larger batch, or smaller micro-batches",
    )


def _slower_compute(prediction: Prediction) -> Bottleneck:
    """Workers that share cores are slower than a single one, and each does the whole update."""
    num_busy = prediction.num_workers * (1 - prediction.idle_share)
    lone_s = prediction.global_batch / prediction.single_worker_samples_per_s
    factor = num_busy * (prediction.report.compute_s - prediction.copy.waits_s) / lone_s
    reason = f"together they compute {factor:.1f}x as long as one worker for the same samples"
    mesh = prediction.mesh
    if mesh.pipeline > 1:
        return Bottleneck(
            factor,
            f"{reason}, since the busiest stage sets the pace"
            + f", and what isn't divided is computed by all {mesh.tensor}" * (mesh.tensor > 1),
            "fewer workers a copy, or blocks that divide evenly",
        )
    if mesh.tensor > 1:
        return Bottleneck(
            factor,
            f"{reason}, since what isn't divided is computed by all {mesh.tensor} of a copy",
            "fewer workers a copy",
        )
    return Bottleneck(factor, reason, "a faster machine")


def _activations(prediction: Prediction) -> Bottleneck:
    """Workers of a copy wait for each other after each half block, and between stages."""
    report, copy = prediction.report, prediction.copy
    waits_s, busy_s = copy.activations_s, report.compute_s - copy.bubble_s - copy.sharding_s
    return Bottleneck(
        busy_s / (busy_s - waits_s),
        f"workers of a copy wait for each other's activations in {waits_s / report.step_s:.0%} of"
        " a step",
        "a faster link between them, or fewer workers a copy",
    )


def _bubble(prediction: Prediction) -> Bottleneck:
    """The bubble: a pipeline fills and empties once per step."""
    report, bubble_s = prediction.report, prediction.copy.bubble_s
    return Bottleneck(
        report.compute_s / (report.compute_s - bubble_s),
        f"the pipeline fills and empties in {bubble_s / report.step_s:.0%} of a step",
        "more micro-batches a step, or fewer workers along `pipeline`",
    )


def _sharding(prediction: Prediction) -> Bottleneck:
    """Waits for FSDP2, which gathers parameters and sums gradients in each micro-batch."""
    report, waits_s = prediction.report, prediction.copy.sharding_s
    return Bottleneck(
        report.compute_s / (report.compute_s - waits_s),
        f"workers wait for sharded parameters and gradients in {waits_s / report.step_s:.0%} of a"
        " step",
        "a faster link between them, or larger micro-batches",
    )


def _stragglers(prediction: Prediction) -> Bottleneck:
    report = prediction.report
    return Bottleneck(
        report.step_s / (report.step_s - report.straggler_s),
        f"they wait for slower ones in {report.straggler_s / report.step_s:.0%} of a step",
        "workers that are equally fast",
    )


def _larger_batch(prediction: Prediction, target: Target) -> Bottleneck:
    batch, single_worker_batch = prediction.global_batch, prediction.single_worker_batch
    factor = target.samples(batch) / target.samples(single_worker_batch)
    return Bottleneck(
        factor,
        f"a batch of {batch:,} takes {factor:.1f}x the samples of one of {single_worker_batch:,} at"
        f" a noise scale of {target.critical_batch:,}",
        "a faster machine; a larger batch would not",
    )
