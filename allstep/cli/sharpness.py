"""`allstep sharpness`: the sharpness of the minimum at a run's newest checkpoint."""

import argparse
import itertools
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from allstep import data
from allstep.cli import run_folder
from allstep.cli.output_files import check_writable, writing_errors
from allstep.cli.rows import make_console, make_table, print_rows
from allstep.cli.workers import num_workers_to_start, run_on_workers
from allstep.comm import Communicator
from allstep.errors import check_integer
from allstep.files import json_text, write_whole
from allstep.recipes import Recipe
from allstep.train import (
    Checkpoints,
    LayerSharpness,
    MeasuredRun,
    Progress,
    Run,
    Sharpness,
    check_sharpness_arguments,
    density,
    rank_correlation,
    sharpness,
)

_FILE, _FILE_OF_ALL = "sharpness.json", "sharpness.jsonl"
_LARGE_RESIDUAL = 0.05  # beyond, eigenvalues of two runs can't be compared


@dataclass(frozen=True)
class Request:
    """The user's request."""

    samples: int
    sigma: float
    num_draws: int
    max_products: int
    layers: bool = False
    all_checkpoints: bool = False


def run(arguments: list[str]) -> int:
    """Measures a run's sharpness, on any number of workers."""
    parser = argparse.ArgumentParser(
        prog="allstep sharpness",
        description="Measures how sharp the minimum is that a run's newest checkpoint is in: the "
        "top eigenvalue of the training loss's Hessian, and the loss's rise under noise on the "
        "weights. Prints a table and writes RUN/sharpness.json, or RUN/sharpness.jsonl.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--workers", metavar="N", type=int, help="workers to start on this machine")
    parser.add_argument(
        "--samples",
        metavar="N",
        type=int,
        default=2048,
        help="training samples that the loss is the mean of, rounded to whole micro-batches",
    )
    parser.add_argument(
        "--sigma", type=float, default=0.05, help="noise over each tensor's root mean square"
    )
    parser.add_argument("--num-draws", metavar="N", type=int, default=8, help="draws of the noise")
    parser.add_argument(
        "--max-products", metavar="N", type=int, default=100, help="most Hessian-vector products"
    )
    parser.add_argument(
        "--layers",
        action="store_true",
        help="also for each layer, beside the trust ratios of LARS and LAMB",
    )
    parser.add_argument(
        "--all-checkpoints",
        action="store_true",
        help="of each checkpoint that the run keeps (--keep-checkpoints), the oldest first",
    )
    known = parser.parse_args(arguments)
    asked = vars(known)
    run_dir, workers = asked.pop("run"), asked.pop("workers")
    request = Request(**asked)
    recipe = run_folder.data_parallel(run_folder.read_recipe(run_dir, argument="run"))
    run_folder.check_has_checkpoint(run_dir)
    check_writable("run", run_dir / _file(request))
    check_integer("samples", request.samples, cure="2048 is usual")
    check_sharpness_arguments(request.sigma, request.num_draws, request.max_products)
    recipe.check()
    return run_on_workers(
        num_workers_to_start(workers),
        sharpness_worker,
        folder=str(run_dir),
        request=asked,
    )


def sharpness_worker(comm: Communicator, folder: str, request: dict[str, Any]) -> None:
    """Measures as one of the workers; rank 0 prints the table and writes the file."""
    shared, run_dir = run_folder.share_run(comm, folder)
    recipe = run_folder.data_parallel(run_folder.with_fitting_shares(shared, comm))
    asked = Request(**request)
    at_steps: list[int | None] = [None]  # the newest
    if asked.all_checkpoints:
        saved_steps = Checkpoints(run_dir / "checkpoints", comm).saved_steps()
        at_steps = comm.broadcast_object(saved_steps[::-1])
    found = [_measure(comm, recipe, run_dir, asked, at_step) for at_step in at_steps]
    if comm.rank > 0:
        return
    if asked.all_checkpoints:
        _show_steps(found)
    else:
        _show(*found[0])
    path = run_dir / _file(asked)
    indent = None if asked.all_checkpoints else 2
    texts = [json_text({"step": step, **asdict(measured)}, indent) for measured, step in found]
    with writing_errors(str(path)):
        write_whole(path, "".join(texts))
    print_rows([("file", str(path))])


def _file(request: Request) -> str:
    return _FILE_OF_ALL if request.all_checkpoints else _FILE


def _measure(
    comm: Communicator, recipe: Recipe, run_dir: Path, request: Request, at_step: int | None = None
) -> tuple[Sharpness, int]:
    task = recipe.task(comm)
    with closing(Run(task, recipe, comm)) as trained:
        Checkpoints(run_dir / "checkpoints", comm).restore(MeasuredRun(trained), step=at_step)
        trained.exchange.sync_buffers()
        stage, precision, step = trained.stage, trained.precision, trained.step
    # The model is as it was before it was attached now: gradients here are no worker's mean.
    micro_batch = min(stage.micro_batch, request.samples)
    loader = data.loader(
        stage.train_set,
        comm,
        global_batch=request.samples // micro_batch * micro_batch,
        micro_batch=micro_batch,
        seed=recipe.seed,
        num_workers=recipe.loader_workers,
        collate_fn=task.collate_fn,
    )
    with loader:
        batch = next(loader.global_batches())
        num_layers = request.layers * sum(p.requires_grad for p in task.model.parameters())
        most_products = (1 + num_layers) * request.max_products
        most_times = 1 + most_products + request.num_draws + request.layers
        num_passes = itertools.count(1)
        with Progress(most_times * batch.num_local_micro_batches, comm, unit="pass") as progress:

            def loss(model: nn.Module, micro_batch: Any) -> Tensor:
                progress.advance(next(num_passes))
                return task.mean_loss(model, precision.prepare_data(micro_batch))

            measured = sharpness(
                task.model,
                loss,
                batch,
                comm,
                max_products=request.max_products,
                sigma=request.sigma,
                num_draws=request.num_draws,
                seed=recipe.seed,
                layers=request.layers,
            )
    return measured, step


def _show(measured: Sharpness, step: int) -> None:
    has_converged = measured.residual <= _LARGE_RESIDUAL
    advice = "" if has_converged else "; not converged, raise --max-products"
    rows = [
        ("step", f"{step:,}"),
        ("loss", f"{measured.loss:.4f}, of {measured.num_samples:,} training samples"),
        (
            "top eigenvalue",
            f"{measured.top_eigenvalue:.4g}, within {measured.residual:.1%}"
            f" ({measured.num_products} products){advice}",
        ),
        (
            "loss rise",
            f"{measured.loss_rise:.4g} +- {measured.loss_rise_error:.2g} with noise of"
            f" {measured.sigma:g} times each tensor's root mean square",
        ),
    ]
    print_rows(rows)
    if measured.layers:
        _show_layers(measured.layers)


def _show_steps(found: Sequence[tuple[Sharpness, int]]) -> None:
    """A line for each checkpoint; for layers, how LARS's and LAMB's ratios follow 1 / curvature."""
    has_layers = any(measured.layers for measured, _ in found)
    names = ["LARS", "LAMB"] if has_layers else []
    table = make_table("step", "loss", "top eigenvalue", "loss rise", *names)
    for measured, step in found:
        mark = "" if measured.residual <= _LARGE_RESIDUAL else " ?"
        numbers = [f"{measured.loss:.4f}", f"{measured.top_eigenvalue:.4g}{mark}"]
        correlations = [f"{value:.2f}" for value, _ in _correlations(measured.layers).values()]
        table.add_row(f"{step:,}", *numbers, f"{measured.loss_rise:.4g}", *correlations)
    make_console().print(table)
    if has_layers:
        print("LARS, LAMB: rank correlation of the ratio and 1 / curvature over the layers")
    if any(measured.residual > _LARGE_RESIDUAL for measured, _ in found):
        print("?: not converged, raise --max-products")


def _show_layers(layers: Sequence[LayerSharpness]) -> None:
    titles = ("parameters", "1 / curvature", "|w| / |g|", "|w| / sqrt(n)", "density of g")
    table = make_table("layer", *titles, left=["layer"])
    table.columns[0].no_wrap = True
    for layer in layers:
        curvature, residual = layer.top_eigenvalue, layer.residual
        mark = "" if residual <= _LARGE_RESIDUAL else " ?"
        table.add_row(
            layer.name,
            f"{layer.num_parameters:,}",
            f"{1 / curvature:.3g}{mark}" if curvature > 0 else "none",
            f"{layer.lars_ratio:.3g}",
            f"{layer.lamb_ratio:.3g}",
            f"{layer.gradient_density:.2f}",
        )
    make_console().print(table)
    if any(layer.residual > _LARGE_RESIDUAL for layer in layers):
        print("?: not converged, raise --max-products")
    print_rows(
        (
            f"{name}'s ratio and 1 / curvature",
            f"rank correlation {correlation:.2f} over {num_layers} layers",
        )
        for name, (correlation, num_layers) in _correlations(layers).items()
        if math.isfinite(correlation)
    )
    print_rows([("density over the layers", _density_over(layers))])


def _density_over(layers: Sequence[LayerSharpness]) -> str:
    """The densities over the layers, on which LARS's rate of convergence depends."""
    by_layer = {
        "gradient": [layer.gradient_norm for layer in layers],
        "noise of a micro-batch": [layer.gradient_noise for layer in layers],
        "curvature": [layer.top_eigenvalue for layer in layers],
    }
    return ", ".join(f"{name} {density(values):.2f}" for name, values in by_layer.items())


def _correlations(layers: Sequence[LayerSharpness]) -> dict[str, tuple[float, int]]:
    """The rank correlations of the two trust ratios with 1 / curvature over the layers.

    Returns:
        By optimizer the rank correlation, NaN where there is none, and over how many layers.
    """
    known = [
        layer
        for layer in layers
        if layer.top_eigenvalue > 0 and layer.residual <= _LARGE_RESIDUAL and layer.gradient_norm
    ]
    found = {}
    for name, ratio in (("LARS", "lars_ratio"), ("LAMB", "lamb_ratio")):
        pairs = [(getattr(layer, ratio), 1 / layer.top_eigenvalue) for layer in known]
        found[name] = rank_correlation(pairs), len(pairs)
    return found
