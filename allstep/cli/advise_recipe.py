"""What a recipe's step costs on this machine, for `allstep advise RECIPE`."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import tyro
from torch import Tensor

from allstep import data
from allstep.cli.run_folder import data_parallel, find_recipe
from allstep.comm import Communicator
from allstep.doctor.workload import make_workload, time_step
from allstep.plan.workload import Workload
from allstep.recipes import AnyRecipe, Recipe
from allstep.train.devices import map_tensors
from allstep.train.precision import Precision

__all__ = ["measure", "read_recipe_flags"]

_NUM_REPEATS = 5


def read_recipe_flags(name: str, flags: Sequence[str]) -> Recipe:
    """The recipe of this name with its fields set by flags, checked.

    Raises:
        UsageError: if there is none, or its data is missing.
    """
    recipe_class = find_recipe(name)
    parsed: AnyRecipe = tyro.cli(recipe_class, args=flags, prog=f"allstep advise {name}")
    recipe = data_parallel(parsed)
    recipe.check()
    return recipe


def measure(recipe: Recipe) -> Workload:
    """Times one micro-batch: forward, backward with the gradients' order, and the update."""
    with closing(Communicator.lone()) as comm:
        task = recipe.task(comm)
        precision = Precision(recipe.precision, comm.device, channels_last=recipe.channels_last)
        model = precision.prepare_model(task.model).train()
        optimizer = task.optimizer(model)
        micro_batch = precision.prepare_data(_first_micro_batch(recipe, comm, task))

        def loss_of() -> Tensor:
            with precision.autocast():
                loss: Tensor = task.loss(model, micro_batch)
            return loss

        # The first steps load kernels.
        timed = [time_step(model, loss_of, optimizer.step) for _ in range(2 + _NUM_REPEATS)]
        return make_workload(timed[2:], recipe.micro_batch)


def _first_micro_batch(recipe: Recipe, comm: Communicator, task: Any) -> Any:
    loader = data.loader(
        task.train_set,
        comm,
        global_batch=recipe.micro_batch,
        micro_batch=recipe.micro_batch,
        seed=recipe.seed,
        collate_fn=task.collate_fn,
    )
    with closing(loader):
        batch = next(loader.global_batches())
        samples = next(batch.micro_batches).data
    return map_tensors(samples, lambda tensor: tensor.to(comm.device))
