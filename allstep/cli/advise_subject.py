"""What `allstep advise` is asked about: bare numbers, a recipe or a script."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from allstep.cli.advise_flags import DTYPE_BYTES, make_parser
from allstep.cli.quantities import parse_count
from allstep.errors import UsageError, nearest_names
from allstep.plan import Cluster, TrainingSpec, Workload, check_positive

if TYPE_CHECKING:
    from allstep.cli.advise_worker import Question

__all__ = ["Subject", "read_command_line", "read_subject"]

_MICRO_BATCH = 32


class Subject(Protocol):
    """A training that somebody wants to scale."""

    def job(self, cluster: Cluster) -> TrainingSpec:
        """Its numbers, measured here if they have to be."""

    def question(self) -> "Question":
        """What workers need to run it for real."""


def read_command_line(arguments: Sequence[str]) -> tuple[str | None, Namespace, list[str]]:
    """A name or None, the flags of `allstep advise`, and those of the recipe or script.

    These are all that `advise` doesn't know, and all behind `--`.
    """
    if not arguments or arguments[0].startswith("-"):
        return None, make_parser().parse_args(arguments), []
    name, *flags = arguments
    split = flags.index("--") if "--" in flags else len(flags)
    if not _is_script(name) and {"-h", "--help"} & set(flags[:split]):
        _show_help(name)
    known, rest = make_parser().parse_known_args(flags[:split])
    return name, known, [*rest, *flags[split + 1 :]]


def _is_script(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def _show_help(recipe_name: str) -> None:
    """Prints the flags of `advise` and those of the recipe, and ends the process."""
    from allstep.cli.advise_recipe import read_recipe_flags
    from allstep.cli.run_folder import find_recipe

    find_recipe(recipe_name)
    make_parser().print_help()
    print()
    read_recipe_flags(recipe_name, ["--help"])


def read_subject(known: Namespace, name: str | None, rest: Sequence[str]) -> Subject:
    """The training that a command line means; mistakes show before anything is measured.

    Args:
        known: the flags of `allstep advise`.
        name: what comes before them: a recipe, a script, or nothing.
        rest: flags that aren't of `allstep advise`.
    """
    if name is None:
        return _BareNumbers(known)
    for field in ("params", "step_ms", "dtype"):
        if getattr(known, field) is not None:
            flag = f"--{field.replace('_', '-')}"
            cure = f"give it to the script behind `--`, `allstep advise {name} ... -- {flag} ...`"
            raise UsageError(
                f"`{field}` (={getattr(known, field)}) is measured for a recipe or a script: leave"
                f" `{flag}` out, or {cure if _is_script(name) else f'leave `{name}` out'}."
            )
    if _is_script(name):
        return _Script(known, Path(name), rest)
    return _NamedRecipe(known, name, rest)


class _BareNumbers:
    def __init__(self, known: Namespace) -> None:
        self._known = known

    def job(self, cluster: Cluster) -> TrainingSpec:
        step_s = None
        if cluster.samples_per_s is not None:
            step_s = self._micro_batch / cluster.samples_per_s
        return TrainingSpec(micro=self._workload(step_s), global_batch=self._known.global_batch)

    def question(self) -> "Question":
        from allstep.cli.advise_worker import Question

        return Question(workload=self._workload(None), global_batch=self._known.global_batch)

    @property
    def _micro_batch(self) -> int:
        return _MICRO_BATCH if self._known.micro_batch is None else int(self._known.micro_batch)

    @property
    def _element_bytes(self) -> int:
        name = self._known.dtype or "float32"
        if name not in DTYPE_BYTES:
            raise UsageError(f"`dtype` (={name}): {nearest_names(name, DTYPE_BYTES)}")
        return DTYPE_BYTES[name]

    def _workload(self, known_step_s: float | None) -> Workload:
        """A micro-batch; `known_step_s` is what the cluster's file says, if it does."""
        known = self._known
        if known.params is None:
            raise UsageError(
                "`params` is missing: how many parameters the model has, such as `--params 25M`;"
                " or name a recipe, `allstep advise digits --link 10gbit`, or a script."
            )
        if known.step_ms is not None:
            check_positive("step_ms", known.step_ms, "110 is a tenth of a second")
            known_step_s = known.step_ms / 1000
        if known_step_s is None:
            raise UsageError(
                "`step_ms` is missing: how long one worker takes for a micro-batch, forward and"
                " backward, such as `--step-ms 110`."
            )
        return Workload.from_step(
            num_params=parse_count("params", known.params),
            step_s=known_step_s,
            num_samples=self._micro_batch,
            element_bytes=self._element_bytes,
        )


class _NamedRecipe:
    def __init__(self, known: Namespace, name: str, flags: Sequence[str]) -> None:
        from allstep.cli.advise_recipe import read_recipe_flags

        for field in ("micro_batch", "global_batch"):
            if getattr(known, field) is not None:
                flags = [*flags, f"--{field.replace('_', '-')}", str(getattr(known, field))]
        self._recipe = read_recipe_flags(name, flags)

    def job(self, cluster: Cluster) -> TrainingSpec:
        from allstep.cli.advise_recipe import measure

        return TrainingSpec(micro=measure(self._recipe), global_batch=self._recipe.global_batch)

    def question(self) -> "Question":
        from allstep.cli.advise_worker import Question
        from allstep.cli.run_folder import recipe_to_plain

        recipe = self._recipe
        return Question(recipe=recipe_to_plain(recipe), global_batch=recipe.global_batch)


class _Script:
    def __init__(self, known: Namespace, path: Path, arguments: Sequence[str]) -> None:
        if known.micro_batch is not None:
            raise UsageError(
                f"`micro_batch` (={known.micro_batch}) is the script's own: leave `--micro-batch`"
                f" out, or give it to the script behind `--`, `allstep advise {path} ..."
                f" -- --micro-batch {known.micro_batch}`."
            )
        if not known.timeout_s > 0:
            raise UsageError(f"`timeout_s` (={known.timeout_s}) must be above 0.")
        if not path.is_file():
            raise UsageError(f"`script` (={path}) is no file.")
        self._known, self._path, self._arguments = known, path, arguments

    def job(self, cluster: Cluster) -> TrainingSpec:
        return self._job()

    def question(self) -> "Question":
        from allstep.cli.advise_worker import Question

        job = self._job()
        return Question(workload=job.micro, global_batch=job.global_batch)

    def _job(self) -> TrainingSpec:
        from allstep.cli import advise_script

        found = advise_script.profile(self._path, self._arguments, self._known.timeout_s)
        return found.spec(self._known.global_batch)
