"""Asynchronous SGD with a parameter server, as a baseline for the recipe `fashion`."""

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Subset

import allstep
from allstep import Communicator, TrainOptions, UsageError
from allstep.files import json_text, replacing, write_whole
from allstep.recipes.base import Recipe

Server = Literal["plain", "staleness_aware", "in_turn"]
"""How gradients are applied: as they arrive; with the rate divided by their staleness; or in turn,
where workers pull and push one after another, so that no gradient is stale (the control)."""

# The options of `allstep.fit` that have an effect here; all of the recipe's own options have one.
# A server sums no gradients of workers, so `compression` may keep the recipe's default, "exact".
_TAKEN = ("epochs", "global_batch", "micro_batch", "drop_last", "seed", "compression")


def check_options(recipe: Recipe) -> None:
    """Checks that no option is set that a parameter server would ignore.

    Raises:
        UsageError: if one is.
    """
    for field in fields(TrainOptions):
        value, usual = getattr(recipe, field.name), getattr(type(recipe), field.name)
        if field.name not in _TAKEN and value != usual:
            raise UsageError(
                f"`{field.name}` (={value!r}) does nothing with a parameter server, whose workers"
                " don't wait for each other; leave it out, or `parameter_server`."
            )
    if recipe.compression not in ("exact", "fp32"):
        raise UsageError(
            f"`compression` (={recipe.compression!r}): gradients travel to a parameter server as"
            " they are; leave it out, or `parameter_server`."
        )


def train(recipe: Recipe, server: Server, comm: Communicator, run_dir: Path) -> nn.Module:
    """Trains each worker on its own samples; every update is computed from one worker's batch.

    The number of updates, their numbers of samples and their learning rates are those of
    `allstep.fit`. Rank 0 writes `model.pt`, the state dict, and `report.json`.

    Args:
        recipe: the recipe to train.
        server: how gradients are applied.
        comm: the workers, on CPUs.
        run_dir: the run's folder, which exists.

    Returns:
        The trained model, the same on every worker.
    """
    task = recipe.task(comm)
    in_pairs = [rank for rank in range(comm.size) for _ in ("pull", "push")]
    num_samples = len(task.train_set)  # type: ignore[arg-type]
    num_scheduled = recipe.epochs * recipe.steps_per_epoch(num_samples)  # short batches add more
    with allstep.exchange.ParameterServer(
        task.model,
        comm,
        task.optimizer(task.model),
        schedule=allstep.optim.hold(task.schedule, num_scheduled),
        staleness_aware=server == "staleness_aware",
        arrivals=in_pairs if server == "in_turn" else None,
    ) as parameters:
        num_own_updates = _train_own_samples(recipe, task, comm, parameters)
    num_updates = comm.all_reduce(torch.tensor(num_own_updates)).item()
    evaluate = allstep.Evaluator(task.metrics, task.test_set, comm, micro_batch=recipe.micro_batch)
    metrics = evaluate(task.model)
    if comm.rank == 0:
        report = {
            "workers": comm.size,
            "num_steps": num_updates,
            "num_epochs": recipe.epochs,
            "metrics": metrics,
            "totals": evaluate.totals,
            "staleness": parameters.staleness,
            "interrupted": None,
        }
        with replacing(run_dir / "model.pt") as draft:
            torch.save(task.model.state_dict(), draft)
        write_whole(run_dir / "report.json", json_text(report))
        _show(report, run_dir)
    return task.model


def _train_own_samples(
    recipe: Recipe,
    task: allstep.Task,
    comm: Communicator,
    parameters: "allstep.exchange.ParameterServer",
) -> int:
    """Trains on this worker's samples; returns the number of its updates."""
    if comm.rank == 0:
        print(
            f"{comm.size} workers, each with samples of its own, and a parameter server", flush=True
        )
    alone = Communicator.single_process()
    exchange = allstep.attach(task.model, alone)  # sums over the worker's own micro-batches
    own = range(comm.rank, len(task.train_set), comm.size)  # type: ignore[arg-type]
    loader = allstep.data.loader(
        Subset(task.train_set, own),
        alone,
        global_batch=recipe.global_batch,
        micro_batch=recipe.micro_batch,
        drop_last=recipe.drop_last,
        seed=recipe.seed * comm.size + comm.rank,
    )
    num_steps = recipe.epochs * recipe.steps_per_epoch(len(own))
    with allstep.train.Progress(num_steps, comm, unit="update of rank 0") as progress:
        for _ in range(recipe.epochs):
            for batch in allstep.steps(loader, exchange):
                parameters.pull()
                for data in batch:
                    batch.backward(task.mean_loss(task.model, data))
                parameters.push()
                progress.advance(loader.step)
    return loader.step


def _show(report: dict[str, Any], run_dir: Path) -> None:
    counts = report["staleness"]  # staleness -> number of updates, over all servers
    mean = sum(late * n for late, n in counts.items()) / max(1, sum(counts.values()))
    for name, value in report["metrics"].items():
        print(f"{name}: {value:.4f}")
    updates = f"{report['num_steps']} by {report['workers']} workers"
    print(f"updates: {updates}, on average {mean:.2f} late")
    print(f"run: {run_dir}, with model.pt")
