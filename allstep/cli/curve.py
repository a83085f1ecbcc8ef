"""`allstep curve`: the error over the amount of training data, and the gain of more data."""

import argparse
import sys
from collections.abc import Callable, Sequence, Sized
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from allstep.cli.curve_output import Curve, draw, plain_curve, show_check, show_prediction
from allstep.cli.rows import print_json
from allstep.cli.run_folder import data_parallel, usual_folder
from allstep.cli.sweep import add_flags, read_known, tell_how_to_go_on
from allstep.cli.sweep_plan import keep_plan, read_axes
from allstep.cli.train import read_command_line
from allstep.cli.trainings import (
    Jobs,
    Outcome,
    Training,
    check_folders,
    read_jobs,
    run_trainings,
    write_json,
)
from allstep.comm import Communicator
from allstep.data import subset_size
from allstep.errors import UsageError, check_integer
from allstep.plan import HeldOutErrors, fit_learning_curve
from allstep.recipes import Recipe
from allstep.train import FAILED

_SHARES = "0.01,0.03,0.1,0.3"
_OWN = {
    "train_share": "`--shares` says which",
    "seed": "`--seeds` says how many, from 0 on",
    "shares": "the workers of a training have equal shares of its micro-batches here",
}


Train = Callable[[Sequence[Training], Jobs], tuple[list[Outcome], int | None]]


def run(arguments: list[str], *, train: Train = run_trainings) -> int:
    """Trains on parts of the training set, predicts the whole, and with `--check` measures it.

    Args:
        arguments: what follows `allstep curve`.
        train: runs trainings.
    """
    known, flags = _read(arguments)
    jobs = read_jobs(known.jobs, known.workers)
    recipe = _read_recipe(known.recipe, flags)
    num_samples = _num_train_samples(recipe)
    folder = known.curve_dir or usual_folder("curves", known.recipe)
    trainings = _trainings(recipe, num_samples, known, folder)
    whole = [
        _training(recipe, 1.0, seed, num_samples, "steps", folder) for seed in range(known.seeds)
    ]
    keep_plan(folder, trainings, "curve_dir")
    check_folders(whole)
    measured, code = _measure(trainings, jobs, num_samples, train)
    if not code:
        found = fit_learning_curve(measured)
        curve = Curve(recipe, known.equal, num_samples, known.seeds, measured, found)
        is_known = all(training.read_report() is not None for training in whole)
        if not is_known:
            write_json(folder / "curve.json", plain_curve(curve))
        if not known.json:
            show_prediction(curve)
        if known.check or is_known:
            in_full, code = _measure(whole, jobs, num_samples, train)
            curve = replace(curve, in_full=in_full)
        if not code:
            _finish(curve, folder, known)
    if code > 128:
        tell_how_to_go_on("curve", arguments, folder, known.curve_dir)
    return code


def _finish(curve: Curve, folder: Path, known: argparse.Namespace) -> None:
    plain = plain_curve(curve)
    write_json(folder / "curve.json", plain)
    names = ["curve.json", *draw(curve, folder / "curve.png")]
    if known.json:
        print_json(plain)
        return
    show_check(curve)
    print(f"{folder} has {', '.join(names)}")


def _read(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="allstep curve",
        usage="allstep curve RECIPE [--shares S,S,...] [--seeds N] [--check] [--curve-dir DIR]\n"
        "                     [flags of the recipe]",
        description="Trains a recipe on parts of its training set, each within the next, fits"
        " error(n) = a * n^-b + c to the held-out errors, and predicts the error on the whole set"
        " and on twice as much. The same command goes on with one that was ended.",
        epilog="example: allstep curve digits --seeds 3 --check",
        allow_abbrev=False,
    )
    add_flags(parser, "curve")
    parser.add_argument(
        "--shares",
        metavar="S,S,...",
        default=_SHARES,
        help=f"of the training set, below 1; {_SHARES}",
    )
    parser.add_argument("--seeds", metavar="N", default="3", help="trainings on each share; 3")
    parser.add_argument(
        "--equal",
        choices=("steps", "epochs"),
        default="steps",
        help="what all shares have as many of as the recipe on the whole set: steps, so that only"
        " the data differ; or epochs, which is cheaper, but small shares are trained less",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="then measure the whole set, too",
    )
    parser.add_argument("--json", action="store_true", help="print it for programs")
    known, flags = read_known(parser, arguments, "seeds")
    check_integer("seeds", known.seeds, cure="3 is usual")
    known.shares = _read_shares(known.shares)
    if len(known.shares) == 2 and known.seeds == 1:
        raise UsageError(
            "`seeds` (=1) with two shares leave nothing to tell how far the errors scatter; give"
            " three shares, or two seeds."
        )
    for word in flags:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in _OWN:
            raise UsageError(f"`{name}` can't be given to `allstep curve`: {_OWN[name]}.")
    return known, flags


def _read_shares(text: str) -> list[float]:
    try:
        shares = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(
            f"`shares` (={text}) must be numbers between commas, such as {_SHARES}."
        ) from None
    if not all(0 < share < 1 for share in shares):
        raise UsageError(
            f"`shares` (={text}) must be above 0 and below 1: the whole set is predicted, and"
            " measured with `--check`."
        )
    if len(shares) < 2 or len(shares) < len(text.split(",")):
        raise UsageError(f"`shares` (={text}) must be two or more, each once; four are usual.")
    return shares


def _read_recipe(name: str, flags: Sequence[str]) -> Recipe:
    axes, _ = read_axes(flags)
    if axes:
        field, values = next(iter(axes.items()))
        raise UsageError(
            f"`{field}` (={','.join(values)}) has one value for a curve; `allstep sweep` takes"
            " lists."
        )
    _, parsed = read_command_line(name, *flags)
    recipe = data_parallel(parsed)
    if recipe.second_stage is not None:
        raise UsageError(
            "`second_sequence_length` makes a training in stages, whose lengths don't go with the"
            " share of the data; give `--second-sequence-length None`."
        )
    recipe.check()
    return recipe


def _num_train_samples(recipe: Recipe) -> int:
    with closing(Communicator.single_process()) as comm:
        train_set = recipe.task(comm).train_set
    assert isinstance(train_set, Sized)
    return len(train_set)


def _trainings(
    recipe: Recipe, num_samples: int, known: argparse.Namespace, folder: Path
) -> list[Training]:
    """The trainings, the longest first, so that all cores are busy to the end."""
    amounts = [subset_size(num_samples, share) for share in known.shares]
    if len(set(amounts)) < len(amounts):
        raise UsageError(
            f"`shares` (={known.shares}) of {num_samples:,} samples are {amounts}, of which some"
            " are equal; choose shares that lie farther apart."
        )
    return [
        _training(recipe, share, seed, num_samples, known.equal, folder)
        for share in reversed(known.shares)
        for seed in range(known.seeds)
    ]


def _training(
    recipe: Recipe, share: float, seed: int, num_samples: int, equal: str, folder: Path
) -> Training:
    """The recipe on a share of its data, with as many steps or epochs, evaluated at the end."""
    steps = recipe.steps_per_epoch(num_samples)
    epochs = recipe.epochs
    if equal == "steps":
        own_steps = recipe.steps_per_epoch(subset_size(num_samples, share))
        epochs = max(1, round(epochs * steps / own_steps))
    assert recipe.warmup_epochs is not None  # the command line has put it in
    own = replace(
        recipe,
        train_share=share,
        seed=seed,
        epochs=epochs,
        warmup_epochs=recipe.warmup_epochs * epochs / recipe.epochs,
        evaluate_every_epochs=epochs,
        checkpoint_every_steps=recipe.checkpoint_every_steps or steps,
    )
    name = f"train-share={share:.15g},seed={seed}"  # another one for each amount of samples
    return Training(name, own, folder / name)


def _measure(
    trainings: Sequence[Training], jobs: Jobs, num_samples: int, train: Train
) -> tuple[list[HeldOutErrors], int]:
    """Measures held-out errors; also returns an exit code if some are missing."""
    outcomes, came = train(trainings, jobs)
    if came is not None:
        return [], 128 + came
    if any(outcome.report is None for outcome in outcomes):
        print("error: without these trainings there is no curve", file=sys.stderr)
        return [], FAILED
    found = []
    for outcome in outcomes:
        assert outcome.report is not None
        num_right, num_held_out = outcome.report["totals"]["accuracy"]
        amount = subset_size(num_samples, outcome.training.recipe.train_share)
        found.append(HeldOutErrors(amount, num_held_out - num_right, num_held_out))
    return found, 0
