"""Advice as JSON and as a picture."""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from allstep.cli.advise_output import Advice
from allstep.cli.output_files import check_plot, check_writable, new_figure, writing_errors
from allstep.files import json_text
from allstep.plan import Prediction, plain_data


def check_files(known: Namespace) -> None:
    """Raises UsageError for files that can't be written, before any work is done."""
    if known.json is not None:
        check_writable("json", known.json)
    if known.plot is not None:
        check_plot(known.plot)


def write_files(known: Namespace, advice: Advice) -> None:
    """Writes the files that were requested."""
    write_plain(known, plain_advice(advice))
    if known.plot is not None:
        _write_plot(known.plot, advice)


def write_plain(known: Namespace, plain: dict[str, Any]) -> None:
    """Writes all numbers as JSON, if requested."""
    if known.json is None:
        return
    with writing_errors(f"`json` (={known.json})"):
        known.json.write_text(json_text(plain), encoding="utf-8")


def plain_advice(advice: Advice) -> dict[str, Any]:
    """All numbers as plain data; None for unknown values and those that were not requested."""
    found, micro = advice.recommendation, advice.job.micro
    return {
        "params": micro.num_params,
        "micro_batch": micro.num_samples,
        "forward_s": micro.forward_s,
        "backward_s": micro.backward_s,
        "optimizer_s": micro.optimizer_s,
        "compute_s": micro.compute_s,
        "global_batch": advice.job.global_batch,
        "total_samples": advice.job.total_samples,
        "noise_scale": None if advice.target is None else advice.target.critical_batch,
        "cluster": asdict(advice.cluster),
        "accuracy_task": advice.accuracy.task,
        "predictions": [_plain_prediction(advice, p) for p in advice.predictions],
        "recommended": _plain_or_none(advice, found.choice),
        "in_code": None if found.choice is None else found.choice.policy.in_code,
        "advice": found.sentence,
        "lossy": _plain_or_none(advice, found.lossy),
        "lossy_in_code": None if found.lossy is None else found.lossy.policy.in_code,
        "lossy_advice": found.lossy_sentence,
        "would_help": None if advice.growth is None else advice.growth.what,
        "curve_advice": None if advice.growth is None else advice.growth.sentence,
    }


def _plain_or_none(advice: Advice, prediction: Prediction | None) -> dict[str, Any] | None:
    return None if prediction is None else _plain_prediction(advice, prediction)


def _plain_prediction(advice: Advice, prediction: Prediction) -> dict[str, Any]:
    cost, target = advice.accuracy.cost(prediction.policy), advice.target
    samples = time = None
    if target is not None:
        batches = prediction.global_batch, prediction.single_worker_batch
        samples = target.samples(batches[0]) / target.samples(batches[1])
        time = 1 / target.speed_up(prediction)
    bill = advice.bill(prediction)
    return {
        **plain_data(prediction),
        "points_lost": None if cost is None else asdict(cost),
        "measured_s": advice.measured_s.get((prediction.policy.name, prediction.num_workers)),
        "relative_samples_to_target": samples,
        "relative_time_to_target": time,
        # infinite where a training never ends, as interruptions are more frequent than checkpoints
        "training_hours": None if bill is None else bill.hours,
        "training_cost": None if bill is None else bill.total,
    }


def _write_plot(path: Path, advice: Advice) -> None:
    """Plots the efficiency over the number of workers."""
    figure = new_figure()
    axes = figure.subplots()
    for name, row in advice.policies.items():
        axes.plot(list(row), [100 * p.efficiency for p in row.values()], marker="o", label=name)
    choice = advice.recommendation.choice
    if choice is not None:
        axes.plot(
            choice.num_workers, 100 * choice.efficiency, "k*", markersize=16, label="recommended"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(advice.worker_counts, [f"{count:,}" for count in advice.worker_counts])
    axes.set(xlabel="workers", ylabel="efficiency (%)", ylim=(0, 105))
    axes.set_title(advice.cluster.name, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    with writing_errors(f"`plot` (={path})"):
        figure.savefig(path, dpi=150)
