"""`allstep verify`: whether a script trains the same model on any number of workers, or why not."""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from allstep.cli.launch import Workers, launch_workers
from allstep.cli.verify_machines import run_machines
from allstep.cli.verify_output import Comparison, show, show_json
from allstep.cli.verify_runs import Runs, Start
from allstep.cli.verify_starts import read_starts
from allstep.doctor import Factor, RunRecord, diagnose, nonfinite_step
from allstep.errors import UsageError, check_integer

_EXAMPLE = "example: allstep verify train.py -n 1,2,4 --steps 20 -- --lr 0.1"


def run(arguments: list[str], *, launch: Callable[[Workers], int] = launch_workers) -> int:
    """Runs the script on each number of workers, or mesh, and compares; 0 if all are the same.

    Args:
        arguments: what follows `allstep verify`.
        launch: runs workers.
    """
    if "--machines" in arguments[:1]:
        return run_machines(arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    known = _make_parser().parse_args(arguments[:split])
    starts = read_starts(known.workers, known.mesh, arguments[split + 1 :])
    _check(known)
    with tempfile.TemporaryDirectory(prefix="allstep-verify-") as folder:
        runs = Runs(
            script=known.script,
            folder=Path(folder),
            timeout_s=known.timeout_s,
            console=Console(stderr=True),
            launch=launch,
        )
        comparison = _compare(runs, starts, known.steps)
    if known.json:
        show_json(known.script, comparison)
    else:
        show(comparison)
    return 0 if comparison.is_same else 1


def _compare(runs: Runs, starts: Sequence[Start], num_steps: int) -> Comparison:
    first, *others = starts
    # Steps enough to recognise a schedule that is run through faster.
    num_first = max(num_steps, 2 * max(start.size for start in others) // first.size + 1)
    one = runs.make(first, num_first)
    found = [runs.make(start, num_steps, whole=one) for start in others]
    for start, other in zip(others, found, strict=True):
        if nonfinite_step(one, other) == 0:
            raise UsageError(
                f"`script` (={runs.script}) is not finite after its first step on {first} and on"
                f" {start}: there is nothing to compare. Are its data finite, and its learning rate"
                " what it should be?"
            )

    def rerun(start: Start, factors: Sequence[Factor], steps: int) -> tuple[RunRecord, RunRecord]:
        again = runs.make(first, steps, factors)
        return again, runs.make(start, steps, factors, whole=again)

    both = zip(others, found, strict=True)
    diagnoses = [diagnose(one, other, partial(rerun, start)) for start, other in both]
    return Comparison(one=one, others=found, diagnoses=diagnoses, num_steps=num_steps)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allstep verify",
        usage="allstep verify SCRIPT [-n 1,2 | --mesh AXIS=N,... --mesh ...] [--steps K] [--json]"
        " [-- SCRIPT ARGUMENTS]",
        description="Runs a script that calls `allstep.attach` on each number of workers, or on"
        " each mesh, for some steps, and says whether it trains the same model; if not, where they"
        " diverge and why.",
        epilog=_EXAMPLE,
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a Python file, as it is")
    parser.add_argument("-n", "--workers", metavar="N,N,...", help="numbers of workers (1,2)")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        action="append",
        default=[],
        help="the axes of a mesh that the script makes; give it twice or more, and all are compared"
        " with the first. In the script's arguments {AXIS} stands for an axis's length",
    )
    parser.add_argument("--steps", metavar="K", type=int, default=10, help="to compare (10)")
    parser.add_argument(
        "--timeout-s",
        metavar="S",
        type=float,
        default=300.0,
        help="longest time without a forward or a step (300)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    return parser


def _check(known: argparse.Namespace) -> None:
    check_integer("steps", known.steps)
    if not known.timeout_s > 0:
        raise UsageError(f"`timeout_s` (={known.timeout_s}) must be above 0.")
    if not known.script.is_file():
        raise UsageError(
            f"`script` (={known.script}) is no file; give the path of a Python script that calls"
            " `allstep.attach`."
        )
