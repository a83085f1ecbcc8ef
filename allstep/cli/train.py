"""`allstep train`: starts local workers, or runs as one of a launcher's workers."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from allstep.cli import run_folder
from allstep.cli.doctor_together import check_port, refusal
from allstep.cli.exits import forget_exits
from allstep.cli.flags import read_flags
from allstep.cli.hosts import HELP, HostOptions, split_host_options
from allstep.cli.run_on_hosts import run_on_hosts
from allstep.cli.store import read_address
from allstep.cli.workers import (
    ask_workers,
    check_min_workers,
    num_workers_to_start,
    run_here,
    speaking_once,
)
from allstep.comm import Communicator, read_states
from allstep.env import read_launch
from allstep.errors import UsageError, check_integer
from allstep.optim import Rescaled
from allstep.recipes import (
    REGISTRY,
    AnyRecipe,
    DividedRecipe,
    Recipe,
    apply_large_batch,
    describe_changes,
    find_recipe,
)
from allstep.train import FAILED, check_elastic, fit, launcher_lock

_USAGE = """\
usage: allstep train RECIPE [--workers N] [--run-dir DIR] [--large-batch NAME] [flags of the recipe]
       allstep train RECIPE --help
       allstep train RECIPE --run-dir DIR --resume auto ...
       allstep train --resume RUN [--workers N]
       allstep train ... --hosts HOST:N,HOST:N [flags of hosts]

recipes: {recipes}

flags of hosts:
{hosts}"""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The number of workers, and the run's folder."""

    workers: int | None = None
    """Workers to start on this machine; by default one for each GPU, or one."""

    run_dir: Path | None = None
    """Folder for checkpoints and metrics; by default runs/RECIPE-DATE-TIME."""

    resume: Literal["auto"] | None = None
    """auto: go on with the run in `run_dir` if there is one, else begin it there. torchrun's
    restarts do so by themselves."""

    elastic: bool = False
    """Go on without workers that are lost, and with others that `allstep join` brings; the same
    model. It needs exact sums."""

    min_workers: int = 1
    """With `elastic`: fewer than this end the run."""

    store: str | None = None
    """With `elastic`: HOST:PORT of an `allstep store`, in which workers find each other; then the
    run outlives this command, as long as workers are left that `allstep join` has brought."""

    restarts: int = 0
    """How often to start the workers again, from the newest checkpoint, when one has failed, or
    all of an elastic run; not after a mistake in the command line or on a full disk."""

    doctor: Literal["quick"] | None = None
    """quick: look at the hosts first, for what takes no time, and refuse to train where `allstep
    doctor` finds a fault that has a cure."""

    large_batch: str | None = None
    """A published large-batch recipe, rescaled to this batch and these epochs: goyal_1h,
    akiba_15min, lars_32k, lamb_imagenet, lamb_bert_76min or lamb_fashion. Flags that you give
    win."""

    def given(self, *names: str) -> dict[str, Any]:
        """The given fields whose values aren't the defaults, with these values."""
        values = {name: getattr(self, name) for name in names}
        return {n: value for n, value in values.items() if value != getattr(LaunchOptions, n)}


_ELASTIC = ("min_workers", "store")  # what goes with `elastic` only


def run(arguments: list[str]) -> int:
    """Trains the named recipe, or continues the run given with `--resume`."""
    hosts, arguments = split_host_options(arguments)
    if hosts is not None:
        return _train_on_hosts(hosts, arguments)
    resumed = _resumed(arguments)
    if resumed is not None and (resumed != "auto" or arguments[0].startswith("-")):
        return _start(_read_resume(arguments), None)
    if not arguments or arguments[0].startswith("-"):
        is_help = bool(arguments) and arguments[0] in ("-h", "--help")
        print(
            _USAGE.format(recipes=", ".join(REGISTRY), hosts=HELP),
            file=None if is_help else sys.stderr,
        )
        return 0 if is_help else 2
    options, recipe = read_command_line(*arguments)
    recipe.check()
    if description := recipe.describe():
        with speaking_once():
            print(description)
    return _start(options, recipe)


def _start(options: LaunchOptions, recipe: AnyRecipe | None) -> int:
    """Checks all options, and trains.

    Args:
        options: of the command line.
        recipe: that was checked; None for the one of the run in `run_dir`, which goes on.
    """
    num_workers = num_workers_to_start(options.workers)
    _check_starter(options, num_workers)
    resume, is_first = recipe is None, read_launch().rank == 0  # which alone touches the disk
    if options.run_dir is not None and resume and is_first:
        recipe = run_folder.read_recipe(options.run_dir, argument="resume")
        run_folder.check_not_in_training(options.run_dir)
        recipe.check()
    if recipe is not None:
        if num_workers is not None:  # others meet first
            recipe.check_workers(num_workers)
        _check_elastic(options, recipe, num_workers)
    _check_host(options, num_workers)
    run_dir = options.run_dir if is_first else None
    if recipe is not None and is_first and not resume:
        run_dir, resume = _open_run(options, recipe)
    with contextlib.ExitStack() as stack:
        if run_dir is not None:
            if num_workers is not None:  # other launchers stay out
                stack.enter_context(launcher_lock(run_dir))
            if recipe is not None and not resume:
                run_folder.write_recipe(run_dir, recipe)
            run_folder.note_launch(run_dir, **options.given("elastic", *_ELASTIC, "restarts"))
        return _train_on(num_workers, run_dir, options, resume=resume)


def _check_host(options: LaunchOptions, num_workers: int | None) -> None:
    """Checks this host as `doctor` does, as far as that needs no connected workers."""
    if options.doctor is None:
        return
    if num_workers is None:
        check_port()
        return
    folder = options.run_dir or Path("runs")
    if found := refusal(Communicator.single_process(), folder, num_workers):
        raise UsageError(found)


def _check_elastic(options: LaunchOptions, recipe: AnyRecipe, num_workers: int | None) -> None:
    """Raises UsageError if a run can't be elastic, or elastic flags are given for another."""
    if not options.elastic:
        for name, value in options.given(*_ELASTIC).items():
            raise UsageError(
                f"`{name}` (={value}) needs `--elastic`: without it all workers end when one is"
                " lost."
            )
        return
    assert num_workers is not None
    check_min_workers(options.min_workers, num_workers)
    if isinstance(recipe, DividedRecipe) or recipe.divides_model or recipe.trains_itself:
        what = recipe.trains_itself or "divides its model"
        raise UsageError(
            f"`elastic`: {recipe.name} {what}, of which a part would go with a worker that is lost;"
            " leave it out."
        )
    check_elastic(recipe)
    if options.store is not None:
        read_address(options.store)  # before anything is written


def _check_starter(options: LaunchOptions, num_workers: int | None) -> None:
    """Raises UsageError for elastic workers or restarts under another launcher."""
    check_integer("restarts", options.restarts, 0)
    if num_workers is not None:
        return
    for name, value in options.given("elastic", "restarts").items():
        raise UsageError(
            f"`{name}` (={value}) needs workers that this command starts, but"
            f" {read_launch().launcher} has started them: leave it out, and have them started"
            " again by torchrun's `--max-restarts` or the scheduler."
        )


def _resumed(arguments: Sequence[str]) -> str | None:
    """The value of `--resume`; None if it is not given, empty if it has no value."""
    for word, following in pairwise([*arguments, ""]):
        name, has_value, value = word.partition("=")
        if name == "--resume":
            return value if has_value else following
    return None


def _open_run(options: LaunchOptions, recipe: AnyRecipe) -> tuple[Path, bool]:
    """The run's folder, and whether to continue the run in it."""
    if options.resume is not None and options.run_dir is None:
        raise UsageError(
            f"`resume` (={options.resume}) needs the run's folder: give `--run-dir DIR`, the same"
            " each time."
        )
    of_any = options.resume is not None
    found = run_folder.find_run(recipe, options.run_dir, of_any_launch=of_any)
    if found is not None:
        print(f"{found} is continued", flush=True)
        return found, True
    return run_folder.make_run_dir(recipe.name, options.run_dir), False


def _train_on_hosts(hosts: HostOptions, arguments: list[str]) -> int:
    """Trains on workers of other hosts, which read the command line again."""
    if not arguments:
        raise UsageError("Name the recipe: allstep train digits --hosts alpha:2,beta:1.")
    if any(word == "--workers" or word.startswith("--workers=") for word in arguments):
        raise UsageError("`workers` can't be given with `--hosts`, which says how many: HOST:N.")
    paths: list[str] = []
    if not arguments[0].startswith("-"):
        _, recipe = read_command_line(*arguments)  # a mistake is told before anything starts
        paths = [str(path) for path in recipe.data_paths()]
    return run_on_hosts(hosts, ["-m", "allstep", "train", *arguments], paths=paths)


def read_command_line(name: str, *flags: str) -> tuple[LaunchOptions, AnyRecipe]:
    """The launch options and the recipe of a command line."""
    recipe_class = find_recipe(name)
    command_line = make_dataclass(
        "CommandLine", [("launch", LaunchOptions), ("recipe", recipe_class)], kw_only=True
    )
    parsed = _read_flags(command_line(launch=LaunchOptions(), recipe=recipe_class()), flags)
    if parsed.launch.large_batch is not None:
        applied, rescaled = apply_large_batch(
            run_folder.data_parallel(parsed.recipe), parsed.launch.large_batch
        )
        parsed = _read_flags(command_line(launch=parsed.launch, recipe=applied), flags)
        _show(rescaled, applied, parsed.recipe)
    return parsed.launch, _with_its_warmup(parsed.recipe)


def _read_flags(defaults: Any, flags: Sequence[str]) -> Any:
    """Reads the flags, with `defaults` for those that are missing."""
    recipe = defaults.recipe
    with speaking_once():
        return read_flags(
            type(defaults),
            flags,
            prog=f"allstep train {recipe.name}",
            description=f"{recipe.name}: {recipe.summary}",
            default=defaults,
        )


def _with_its_warmup(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe with its warm-up in numbers; prints those that differ from the usual ones."""
    if not isinstance(recipe, Recipe) or recipe.warmup_epochs is not None:
        return recipe
    warmup_epochs = recipe.settings.warmup_epochs
    if warmup_epochs and recipe.epochs != type(recipe).epochs:
        with speaking_once():
            print(
                f"warm-up: {warmup_epochs:.2g} of {recipe.epochs} epochs, the recipe's usual share;"
                " `--warmup-epochs` sets another"
            )
    return replace(recipe, warmup_epochs=warmup_epochs)


def _show(rescaled: Rescaled, applied: Recipe, recipe: Recipe) -> None:
    """Prints how a published recipe was rescaled, and which flags changed it."""
    lines = describe_changes(rescaled)
    changed = [
        f"{field.name} {getattr(recipe, field.name)}"
        for field in fields(recipe)
        if getattr(recipe, field.name) != getattr(applied, field.name)
    ]
    if changed:
        lines.append(f"Your flags changed it: {', '.join(changed)}.")
    with speaking_once():
        print("\n".join(lines))


def _read_resume(arguments: list[str]) -> LaunchOptions:
    """The launch options of a resumed run; its folder is `run_dir`."""
    parser = argparse.ArgumentParser(
        prog="allstep train", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--resume", dest="run_dir", metavar="RUN", type=Path, required=True)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--store", metavar="HOST:PORT")
    parser.add_argument("--doctor", choices=["quick"])
    for flag in ("--workers", "--min-workers", "--restarts"):
        parser.add_argument(flag, metavar="N", type=int)
    known, others = parser.parse_known_args(arguments)
    if str(known.run_dir) == "auto":
        name = next((word for word in others if word in REGISTRY), "digits")
        raise UsageError(
            "`resume` (=auto) needs a recipe and the run's folder, first the recipe: allstep train"
            f" {name} --run-dir DIR --resume auto."
        )
    if others:
        names = [word for word in others if not word.lstrip("-").isdigit()] or others
        listed = ", ".join(f"`{word}`" for word in names)
        raise UsageError(
            f"{listed} can't be given with `--resume`: the recipe and its fields come from"
            f" {known.run_dir}/recipe.json. Only `--workers`, `--elastic`, `--min-workers`,"
            " `--store`, `--restarts` and `--doctor` may differ."
        )
    return LaunchOptions(**vars(known))


def _tell_that_it_is_finished(run_dir: Path) -> bool:
    """Whether a run has no step left; then prints what can be done with it."""
    recipe = run_folder.read_recipe(run_dir, argument="resume")
    if not isinstance(recipe, Recipe):
        return False
    report = run_folder.finished_report(run_dir, recipe)
    if report is None:
        return False
    evaluation = f"To measure it again: allstep evaluate {shlex.quote(str(run_dir))}\n"
    with speaking_once():
        print(
            f"{run_dir} finished at step {report['num_steps']}, after {report['num_epochs']}"
            " epochs; its report.json is as it was.\n"
            f"{'' if recipe.trains_itself else evaluation}"
            "For more epochs start a new run, as the learning rate's schedule depends on them:"
            f" allstep train {recipe.name} --epochs N"
        )
    return True


def _train_on(
    num_workers: int | None, run_dir: Path | None, options: LaunchOptions, *, resume: bool
) -> int:
    """Trains; prints how to continue if workers that were started did not finish."""
    folder = None if run_dir is None else str(run_dir)
    is_over = resume and run_dir is not None and _tell_that_it_is_finished(run_dir)
    if num_workers is None:
        return _join_workers(folder, resume, is_over, has_doctor=options.doctor is not None)
    if is_over:
        return 0
    if num_workers == 1 and not options.elastic and not options.restarts:
        forget_exits(run_dir)
        code = run_here(partial(train_worker, folder=folder, resume=resume))
    else:
        code = _train_apart(num_workers, run_dir, options, resume=resume)
    if run_dir is not None and code not in (0, 2) and not run_folder.has_report(run_dir):
        states = read_states(run_dir) if options.elastic else []  # others may have joined
        num_last = states[0].size if states else num_workers
        print(_advice(run_dir, num_last), file=sys.stderr)
    return code


def _train_apart(
    num_workers: int, run_dir: Path | None, options: LaunchOptions, *, resume: bool
) -> int:
    """Trains in processes that this one starts, and restarts as often as the options say."""
    for number in range(options.restarts + 1):
        code, _ = ask_workers(
            num_workers,
            train_worker,
            run_dir=run_dir,
            min_workers=options.min_workers if options.elastic else None,
            store=None if options.store is None else read_address(options.store),
            folder=None if run_dir is None else str(run_dir),
            resume=resume or number > 0,
        )
        if code != FAILED or number == options.restarts:
            break
        print(f"{run_dir} is continued: restart {number + 1} of {options.restarts}", flush=True)
    return code


def _join_workers(folder: str | None, resume: bool, is_over: bool, *, has_doctor: bool) -> int:
    """Trains as one of another launcher's workers; prints how to continue, as it does not.

    Args:
        folder, resume, is_over: what rank 0 says counts: the run's folder, whether to go on with
            it, and whether there is nothing left to do.
        has_doctor: whether to look at all workers' hosts first.
    """
    launcher = read_launch().launcher
    known: list[str] = []

    def advice() -> str:
        """Prints how to continue, on any rank, as rank 0 may be lost."""
        return f"{_advice(Path(known[0]), 1)} (with {launcher}, as before)" if known else ""

    def work(comm: Communicator) -> int:
        shared, goes_on, has_ended = comm.broadcast_object((folder, resume, is_over))
        if has_ended:
            return 0
        if has_doctor and (found := refusal(comm, Path(shared), comm.size)):
            if comm.rank == 0:
                print(f"error: {found}", file=sys.stderr)
            return 2
        known.append(shared)
        code = train_worker(comm, folder, goes_on)
        if comm.rank == 0 and code not in (0, 2) and not run_folder.has_report(Path(known[0])):
            print(advice(), file=sys.stderr)
        return code

    return run_here(work, advice=advice)


def _advice(run_dir: Path, num_workers: int) -> str:
    can = "be continued" if run_folder.has_checkpoint(run_dir) else "start again"
    return (
        f"What happened first: allstep why {shlex.quote(str(run_dir))}\n"
        f"The run can {can}: {run_folder.resume_command(run_dir, num_workers)}"
    )


def train_worker(comm: Communicator, folder: str | None, resume: bool) -> int:
    """Trains as one of the workers; returns its exit code.

    Args:
        comm: this worker's communicator.
        folder: the run's, where `recipe.json` is; needed on rank 0 only.
        resume: continue from the newest checkpoint; without any, begin.
    """
    recipe, run_dir = run_folder.share_run(comm, folder)
    if resume:
        recipe = run_folder.with_fitting_shares(recipe, comm)
    if read_launch().min_workers is not None:  # its number changes
        return _train_recipe(comm, recipe, run_dir, resume=resume, elastic=True)
    with comm.keep_last_state(run_dir):
        return _train_recipe(comm, recipe, run_dir, resume=resume)


def _train_recipe(
    comm: Communicator, recipe: AnyRecipe, run_dir: Path, *, resume: bool, elastic: bool = False
) -> int:
    from allstep.cli.summary import show, summarize

    if comm.rank == 0 and not read_launch().joins:
        run_folder.forget_report(run_dir)
    goes_on = resume and comm.broadcast_object(run_folder.has_checkpoint(run_dir))
    if comm.rank == 0 and resume and not goes_on:
        print(f"{run_dir} has no checkpoint: training starts at its first step", flush=True)
    if isinstance(recipe, DividedRecipe) or recipe.trains_itself is not None:
        return recipe.run(comm, run_dir, resume=goes_on)
    # "auto", as a run that was killed early may have left its best checkpoint only
    how: bool | Literal["auto"] = "auto" if resume else False
    report = fit(recipe.task(comm), recipe, comm, run_dir, resume=how, elastic=elastic)
    summary = summarize(report, recipe, comm)
    if comm.rank == 0:
        run_folder.write_report(run_dir, {**asdict(report), **asdict(summary)})
        show(report, summary)
    return 128 + report.interrupted if report.interrupted else 0
