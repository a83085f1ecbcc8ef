"""What a recipe's step costs on this machine, for `allstep advise RECIPE`."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from allstep import data
from allstep.cli.run_folder import find_recipe
from allstep.comm import Communicator
from allstep.plan.workload import Workload
from allstep.recipes import Recipe
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
    recipe: Recipe = tyro.cli(recipe_class, args=flags, prog=f"allstep advise {name}")
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
        timed = [
            _step(lambda: task.loss(model, micro_batch), model, precision, optimizer.step)
            for _ in range(1 + _NUM_REPEATS)
        ]
        best = min(timed[1:], key=lambda step: step.backward_s)  # the first loads kernels
        return Workload(
            num_params=sum(p.numel() for p in model.parameters() if p.requires_grad),
            forward_s=min(step.forward_s for step in timed),
            backward_s=best.backward_s,
            optimizer_s=min(step.optimizer_s for step in timed),
            num_samples=recipe.micro_batch,
            ready=best.ready(),
        )


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


@dataclass
class _TimedStep:
    """Seconds of one step, and when each gradient was ready: (elements, seconds)."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    gradients: list[tuple[int, float]] = field(default_factory=list)

    def ready(self) -> tuple[tuple[float, float], ...]:
        """The gradient's share over the backward pass's, as `Workload` wants it."""
        totals = list(accumulate(size for size, _ in self.gradients))
        shares = [
            (total / totals[-1], min(1.0, seconds / self.backward_s))
            for total, (_, seconds) in zip(totals, self.gradients, strict=True)
        ]
        return ((0.0, 0.0), *shares[:-1], (1.0, 1.0))


def _step(
    loss_of: Callable[[], Tensor],
    model: nn.Module,
    precision: Precision,
    update: Callable[[], object],
) -> _TimedStep:
    timed = _TimedStep()
    start_s = _now()
    with precision.autocast():
        loss = loss_of()
    timed.forward_s, start_s = _now() - start_s, _now()

    def note(parameter: Tensor) -> None:
        # On CUDA this is when the host got there, early in the pass.
        timed.gradients.append((parameter.numel(), time.perf_counter() - start_s))

    hooks = [
        p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        for p in model.parameters()
        if p.requires_grad
    ]
    loss.backward()  # type: ignore[no-untyped-call]
    timed.backward_s, start_s = _now() - start_s, _now()
    for hook in hooks:
        hook.remove()
    update()
    timed.optimizer_s = _now() - start_s
    model.zero_grad()
    return timed


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
