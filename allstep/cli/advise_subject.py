"""The subject of `allstep advise`: bare numbers, a recipe or a script."""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence, Sized
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

from rich.console import Console
from torch import Tensor, nn

from allstep import data
from allstep.cli.advise_blocks import GivenBlocks, check_pipeline, num_states
from allstep.cli.advise_flags import DTYPE_BYTES, make_parser, refuse_given
from allstep.cli.flags import read_flags
from allstep.cli.launch import Workers
from allstep.cli.quantities import parse_count
from allstep.cli.run_folder import data_parallel
from allstep.cli.script_worker import PROFILE, profile_path
from allstep.cli.worker import last_lines
from allstep.comm import Communicator
from allstep.doctor import (
    NUM_UPDATES,
    Training,
    forward_share,
    measure_workload,
    read_profile,
)
from allstep.errors import UsageError, check_choice, check_positive
from allstep.plan import Cluster, MeshSpec, TrainingSpec, TransformerSpec, Workload
from allstep.recipes import AnyRecipe, Recipe, find_recipe, recipe_to_plain
from allstep.train import Precision, Task, map_tensors

_MICRO_BATCH = 32

Launch = Callable[[Workers], int]


class Question(TypedDict):
    """The training that workers run, as plain data.

    Attributes:
        recipe: whose compute is real.
        workload: a step of one micro-batch, which the workers sleep through; one of the two.
        global_batch: samples of a step whatever the workers.
    """

    recipe: dict[str, Any] | None
    workload: dict[str, Any] | None
    global_batch: int | None


class Subject(Protocol):
    """A training that is to be scaled."""

    def job(self, cluster: Cluster) -> TrainingSpec:
        """The numbers of the training, measured here if necessary."""

    def question(self) -> Question:
        """The description from which workers run the training."""

    def check_mesh(self, mesh: MeshSpec) -> None:
        """Raises UsageError for a mesh that can't divide the model, before anything is measured."""

    @property
    def longest_pipeline(self) -> int:
        """The most workers along `pipeline` among the meshes that `--mesh auto` tries."""

    def model(self, micro: Workload) -> tuple[TransformerSpec, float]:
        """The blocks, and the optimizer's states of a parameter; call `job` first."""


def read_command_line(arguments: Sequence[str]) -> tuple[str | None, Namespace, list[str]]:
    """A name or None, the flags of `allstep advise`, and those of the recipe or script.

    These are all that `advise` doesn't know, and all behind `--`.
    """
    if not arguments or arguments[0].startswith("-"):
        return None, make_parser().parse_args(arguments), []
    name, *flags = arguments
    split = flags.index("--") if "--" in flags else len(flags)
    if not is_script(name) and {"-h", "--help"} & set(flags[:split]):
        _show_help(name)
    known, rest = make_parser().parse_known_args(flags[:split])
    return name, known, [*rest, *flags[split + 1 :]]


def is_script(name: str) -> bool:
    """Whether a name is that of a user's script, not of a recipe."""
    return name.endswith(".py") or "/" in name


def _show_help(recipe_name: str) -> None:
    """Prints the flags of `advise` and those of the recipe, and ends the process."""
    find_recipe(recipe_name)
    make_parser().print_help()
    print()
    _read_recipe(recipe_name, ["--help"])


def _read_recipe(name: str, flags: Sequence[str]) -> Recipe:
    recipe_class = find_recipe(name)
    prog = f"allstep advise {name}"
    parsed: AnyRecipe = read_flags(recipe_class, flags, prog=prog, description=recipe_class.summary)
    return data_parallel(parsed)


def read_subject(
    known: Namespace, name: str | None, rest: Sequence[str], launch: Launch
) -> Subject:
    """The training that a command line describes; raises UsageError before anything is measured.

    Args:
        known: the flags of `allstep advise`.
        name: what comes before them: a recipe, a script, or nothing.
        rest: flags that aren't of `allstep advise`.
        launch: runs workers.
    """
    if name is None:
        return _BareNumbers(known)
    cure = f"leave `{name}` out"
    if is_script(name):
        cure = f"give it to the script behind `--`, `allstep advise {name} ... -- {{flag}} ...`"
    why = f"is measured for a recipe or a script: leave `{{flag}}` out, or {cure}."
    refuse_given(known, ("params", "step_ms", "dtype"), why)
    if is_script(name):
        return _Script(known, Path(name), rest, launch)
    refuse_given(
        known, ("transformer", "states_per_param"), "is the recipe's own: leave `{flag}` out."
    )
    return _NamedRecipe(known, name, rest)


class _BareNumbers(GivenBlocks):
    def job(self, cluster: Cluster) -> TrainingSpec:
        step_s = None
        if cluster.samples_per_s is not None:
            step_s = self._micro_batch / cluster.samples_per_s
        return TrainingSpec(micro=self._workload(step_s), global_batch=self._known.global_batch)

    def question(self) -> Question:
        return _sleeping(self._workload(None), self._known.global_batch)

    @property
    def _micro_batch(self) -> int:
        return _MICRO_BATCH if self._known.micro_batch is None else int(self._known.micro_batch)

    def _workload(self, known_step_s: float | None) -> Workload:
        """A micro-batch's workload; `known_step_s` is from the cluster's file, if it has one."""
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
        dtype = known.dtype or "float32"
        check_choice("dtype", dtype, DTYPE_BYTES)
        return Workload.from_step(
            num_params=parse_count("params", known.params),
            step_s=known_step_s,
            num_samples=self._micro_batch,
            element_bytes=DTYPE_BYTES[dtype],
        )


class _NamedRecipe:
    def __init__(self, known: Namespace, name: str, flags: Sequence[str]) -> None:
        for field in ("micro_batch", "global_batch"):
            if getattr(known, field) is not None:
                flags = [*flags, f"--{field.replace('_', '-')}", str(getattr(known, field))]
        self._recipe = _read_recipe(name, flags)
        self._recipe.check()
        self._known = known
        self._model: tuple[TransformerSpec, float] | None = None

    def job(self, cluster: Cluster) -> TrainingSpec:
        recipe = self._recipe
        if recipe.divides_model:  # with a mesh that is refused before
            raise UsageError(
                f"Flags of recipe `{recipe.name}` divide its model, and whole copies are predicted:"
                " leave these out, such as `--tensor-parallel` and `--shard`. `--mesh"
                " data=2,tensor=2` predicts copies on several workers each."
            )
        with closing(Communicator.single_process()) as comm:
            make_training, total_samples = recipe_training(recipe, comm)
            training = make_training()
            micro = measure_workload(comm, training, num_samples=recipe.micro_batch)
            if self._known.mesh is not None:
                self._model = self._measured_model(training, micro)
        return TrainingSpec(
            micro=micro, global_batch=recipe.global_batch, total_samples=total_samples
        )

    def question(self) -> Question:
        return {
            "recipe": recipe_to_plain(self._recipe),
            "workload": None,
            "global_batch": self._recipe.global_batch,
        }

    def check_mesh(self, mesh: MeshSpec) -> None:
        if self._recipe.divides_model:
            raise UsageError(
                f"`mesh` (={mesh}) and flags of recipe `{self._recipe.name}` both say how the model"
                " is divided: leave these out, such as `--tensor-parallel` and `--shard`."
            )
        divided = self._recipe.with_mesh(pipeline=mesh.pipeline, tensor=mesh.tensor)
        blocks = divided.transformer
        if blocks is None:
            raise UsageError(
                f"`mesh` (={mesh}) divides plain blocks, and those of recipe `{self._recipe.name}`"
                " have experts: leave `--experts` out."
            )
        recipe = self._recipe
        check_pipeline(blocks, mesh, recipe.micro_batch, recipe.global_batch)

    @property
    def longest_pipeline(self) -> int:
        blocks = self._recipe.transformer
        return 1 if blocks is None else blocks.depth

    def model(self, micro: Workload) -> tuple[TransformerSpec, float]:
        assert self._model is not None
        return self._model

    def _measured_model(self, training: Training, micro: Workload) -> tuple[TransformerSpec, float]:
        blocks = self._recipe.transformer
        assert blocks is not None
        layers = self._recipe.divided_layers(training.model)
        share, logits_share = (forward_share(training, some) for some in layers)
        states_per_param = num_states(training.optimizer) / micro.num_params
        measured = replace(blocks, measured_share=share, measured_logits_share=logits_share)
        return measured, states_per_param


class _Script(GivenBlocks):
    def __init__(
        self, known: Namespace, path: Path, arguments: Sequence[str], launch: Launch
    ) -> None:
        super().__init__(known)
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
        self._path, self._arguments = path, list(arguments)
        self._launch = launch

    def job(self, cluster: Cluster) -> TrainingSpec:
        return self._job()

    def question(self) -> Question:
        job = self._job()
        return _sleeping(job.micro, job.global_batch)

    def _job(self) -> TrainingSpec:
        """Runs the script for its first steps, as a single worker in a process of its own."""
        script = self._path
        asked = {
            "script": str(script),
            "arguments": self._arguments,
            "timeout_s": self._known.timeout_s,
        }
        waiting = Console(stderr=True).status(f"{script} on 1 worker, {NUM_UPDATES} steps")
        with tempfile.TemporaryDirectory(prefix="allstep-advise-") as name, waiting:
            folder = Path(name)
            code = self._launch(Workers(1, PROFILE, folder, asked, has_logs=True))
            if code > 128:
                sys.exit(code)
            if not profile_path(folder).exists():
                raise UsageError(
                    f"`script` (={script}) failed with exit code {code}:"
                    f" {' '.join(last_lines(folder, 0, 1))} Run `python {script}` to see where."
                )
            return read_profile(profile_path(folder), script).spec(self._known.global_batch)


def _sleeping(workload: Workload, global_batch: int | None) -> Question:
    return {"recipe": None, "workload": asdict(workload), "global_batch": global_batch}


def recipe_training(
    recipe: Recipe, comm: Communicator
) -> tuple[Callable[[], Training], int | None]:
    """A function that makes a recipe's model and optimizer, for steps on its first micro-batch.

    The second is the samples of the whole training; None if the batch changes on the way, or the
    training set has no length.
    """
    task = recipe.task(comm)
    precision = Precision(recipe.precision, comm.device, channels_last=recipe.channels_last)
    micro_batch = precision.prepare_data(_first_micro_batch(recipe, comm, task))

    def loss_of(model: nn.Module) -> Tensor:
        with precision.autocast():
            loss: Tensor = task.mean_loss(model, micro_batch)
        return loss

    def make() -> Training:
        model = precision.prepare_model(deepcopy(task.model)).train()
        return Training(model, loss_of, task.optimizer(model))

    if not isinstance(task.train_set, Sized) or task.later_stages:
        return make, None
    return make, recipe.epochs * len(task.train_set)


def _first_micro_batch(recipe: Recipe, comm: Communicator, task: Task) -> Any:
    loader = data.loader(
        task.train_set,
        comm,
        global_batch=comm.size * recipe.micro_batch,
        micro_batch=recipe.micro_batch,
        seed=recipe.seed,
        collate_fn=task.collate_fn,
    )
    with closing(loader):
        batch = next(loader.global_batches())
        samples = next(batch.micro_batches).data
    return map_tensors(samples, lambda tensor: tensor.to(comm.device))
