"""What a recipe's step costs on this machine, for `allstep advise RECIPE`."""

from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from typing import Any

import tyro
from torch import Tensor, nn

from allstep import data
from allstep.cli.run_folder import data_parallel, find_recipe
from allstep.comm import Communicator
from allstep.doctor import Training, measure_workload
from allstep.plan import Workload
from allstep.recipes import AnyRecipe, Recipe
from allstep.train.devices import map_tensors
from allstep.train.precision import Precision

__all__ = ["measure", "read_recipe_flags", "recipe_training"]


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
    with closing(Communicator.single_process()) as comm:
        training = recipe_training(recipe, comm)()
        return measure_workload(comm, training, num_samples=recipe.micro_batch)


def recipe_training(recipe: Recipe, comm: Communicator) -> Callable[[], Training]:
    """What makes a recipe's model and optimizer anew, for steps on its first micro-batch."""
    task = recipe.task(comm)
    precision = Precision(recipe.precision, comm.device, channels_last=recipe.channels_last)
    micro_batch = precision.prepare_data(_first_micro_batch(recipe, comm, task))

    def loss_of(model: nn.Module) -> Tensor:
        with precision.autocast():
            loss: Tensor = task.loss(model, micro_batch)
        return loss

    def make() -> Training:
        model = precision.prepare_model(deepcopy(task.model)).train()
        return Training(model, loss_of, task.optimizer(model))

    return make


def _first_micro_batch(recipe: Recipe, comm: Communicator, task: Any) -> Any:
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
