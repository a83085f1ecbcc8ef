"""`allstep sweep`: trains a recipe with several values of its flags, and compares them."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from allstep.cli.rows import print_json
from allstep.cli.run_folder import usual_folder
from allstep.cli.sweep_output import as_plain, ranked, show, write_files
from allstep.cli.sweep_plan import keep_plan, make_plan
from allstep.cli.trainings import read_jobs, run_trainings
from allstep.errors import UsageError
from allstep.recipes import find_recipe
from allstep.train import FAILED

_EXAMPLE = "example: allstep sweep digits --lr 0.05,0.1,0.2 --optimizer sgd,lamb --epochs 5"


def run(arguments: list[str]) -> int:
    """Trains every combination that is not finished yet, and shows all of them."""
    parser = argparse.ArgumentParser(
        prog="allstep sweep",
        usage="allstep sweep RECIPE [--sweep-dir DIR] [--jobs N] [flags of the recipe, with lists]",
        description="Trains a recipe with every combination of the values that its flags have,"
        " several at a time, and prints them sorted by accuracy (or `--best-metric`, at its best)."
        " The same command goes on with a sweep that was ended.",
        epilog=_EXAMPLE,
        allow_abbrev=False,
    )
    add_flags(parser, "sweep")
    parser.add_argument("--json", action="store_true", help="print the table for programs")
    known, flags = read_known(parser, arguments)
    jobs = read_jobs(known.jobs, known.workers)
    folder = known.sweep_dir or usual_folder("sweeps", known.recipe)
    trainings = make_plan(known.recipe, flags, folder)
    keep_plan(folder, trainings, "sweep_dir")
    outcomes, came = run_trainings(trainings, jobs)
    results = ranked(outcomes)
    names = write_files(folder, results)
    if known.json:
        print_json(as_plain(results))
    else:
        show(results)
        print(f"{folder} has {', '.join(names)}")
    if came is not None:
        tell_how_to_go_on("sweep", arguments, folder, known.sweep_dir)
        return 128 + came
    return FAILED if any(outcome.report is None for outcome in outcomes) else 0


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """The flags of a command that runs trainings side by side."""
    parser.add_argument("recipe", metavar="RECIPE", help="which recipe; `allstep recipes` has all")
    parser.add_argument(
        f"--{command}-dir",
        metavar="DIR",
        type=Path,
        help="folder of the runs and results; by default a new one. With the same flags it goes on",
    )
    parser.add_argument(
        "--jobs", metavar="N", help="trainings at a time; by default as the cores have room for"
    )
    parser.add_argument("--workers", metavar="N", help="workers of each training; by default 1")


def read_known(
    parser: argparse.ArgumentParser, arguments: Sequence[str], *counts: str
) -> tuple[argparse.Namespace, list[str]]:
    """The command's flags, those in `counts` as integers, and the recipe's arguments."""
    known, flags = parser.parse_known_args(arguments)
    if arguments[0] != known.recipe:
        raise UsageError(f"Name the recipe first: `{parser.prog} RECIPE ...`; {_EXAMPLE}")
    find_recipe(known.recipe)
    for name in ("jobs", "workers", *counts):
        setattr(known, name, _whole_number(name, getattr(known, name)))
    return known, flags


def _whole_number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if "," in text:
        raise UsageError(
            f"`{name}` (={text}) has one value for the whole command; lists are for flags of the"
            " recipe."
        )
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"`{name}` (={text}) must be a whole number.") from None


def tell_how_to_go_on(
    command: str, arguments: Sequence[str], folder: Path, given: Path | None
) -> None:
    """Prints the command that continues after a signal.

    Args:
        command: its name.
        arguments: what followed it.
        folder: of the trainings.
        given: the same, if the arguments have it.
    """
    rest = [] if given is not None else [f"--{command}-dir", str(folder)]
    print(f"To go on: {shlex.join(['allstep', command, *arguments, *rest])}", file=sys.stderr)
