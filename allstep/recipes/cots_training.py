"""The greedy training of recipe `cots`, with checkpoints that any number of workers go on from."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, UsageError

__all__ = ["GreedyTraining"]

_MOST_GROWTH = 10  # of the cost in a stage, which ought to fall

Draw = Callable[[torch.Generator], Tensor]


class GreedyTraining:
    """Trains stage after stage, `steps` updates each, with a rate that falls linearly to zero.

    Every worker draws the same samples and takes its part of them. An update depends on the seed,
    its number and the checkpointed state alone, so a run that was interrupted goes on as if it
    had not been.

    Args:
        stages: the net; all of it is kept by a checkpoint.
        draw: a batch, this worker's part of it, from a generator.
        comm: the workers.
        run_dir: the run's folder.
        batch: samples of an update.
        steps: updates of a stage.
        seed: of the samples.
        lr, momentum, sparsity, tied: as `allstep.nn.StageTraining`'s.
        log_every_steps, checkpoint_every_steps: how often to write.
        options: plain data; a checkpoint of others is refused.

    Attributes:
        num_steps: updates done, of all stages.
        samples_per_s: of this process's updates.
        costs: for each stage that was trained to its end, its last mean cost.
    """

    def __init__(
        self,
        stages: "list[allstep.nn.Stage]",
        draw: Draw,
        comm: Communicator,
        run_dir: Path,
        *,
        batch: int,
        steps: int,
        seed: int,
        lr: float,
        momentum: float,
        sparsity: float,
        tied: bool,
        log_every_steps: int,
        checkpoint_every_steps: int,
        options: dict[str, Any],
    ) -> None:
        self._stages = stages
        self._draw = draw
        self._comm = comm
        self._batch = batch
        self._steps = steps
        self._seed = seed
        self._training_options: dict[str, Any] = {
            "lr": lr, "momentum": momentum, "sparsity": sparsity, "tied": tied,
        }  # fmt: skip
        self._log_every_steps = log_every_steps
        self._checkpoint_every_steps = checkpoint_every_steps
        self._options = options
        self._checkpoints = allstep.train.Checkpoints(run_dir / "checkpoints", comm)
        self._log = allstep.train.MetricsLog(run_dir, comm)
        self.num_steps = 0
        self.costs: dict[str, float] = {}
        self._training_s, self._num_timed = 0.0, 0
        self._first_cost = math.inf
        self._training = self._start_stage()

    @property
    def num_total_steps(self) -> int:
        """Updates of the whole run."""
        return self._steps * len(self._stages)

    @property
    def samples_per_s(self) -> float:
        """Samples a second while it trained."""
        return self._batch * self._num_timed / self._training_s if self._num_timed else 0.0

    def run(self) -> int | None:
        """Trains to the end; returns the signal that ended it early, after a checkpoint."""
        interrupted = None
        agreement = allstep.train.StopAgreement(self._comm)
        with (
            closing(self._log),
            allstep.train.Interrupts() as interrupts,
            allstep.train.Progress(
                self.num_total_steps, self._comm, epochs=len(self._stages)
            ) as progress,
        ):
            for cost in self._updates():
                if cost is not None:
                    progress.update(self.num_steps, self._index, cost, self.samples_per_s)
                progress.advance(self.num_steps)
                interrupted = agreement(interrupts.requested)
                if interrupted is not None:
                    break
            interrupted = interrupted or agreement.drain()
        self._save()
        return interrupted

    @property
    def _index(self) -> int:
        """Of the stage that is being trained; the last one at the end."""
        return min(self.num_steps // self._steps, len(self._stages) - 1)

    def _updates(self) -> Iterator[float | None]:
        """Makes one update at a time; gives the mean cost now and then."""
        costs, num_costs = torch.zeros((), dtype=torch.float64), 0
        while self.num_steps < self.num_total_steps:
            start_s = time.perf_counter()
            costs, num_costs = costs + self._update().double().cpu(), num_costs + 1
            self._training_s += time.perf_counter() - start_s
            self._num_timed += 1
            shown = None
            is_end = self.num_steps % self._steps == 0
            is_start = self.num_steps % self._steps == 1
            if is_start or is_end or self.num_steps % self._log_every_steps == 0:
                shown = float(self._comm.all_reduce(costs)) / num_costs
                costs, num_costs = torch.zeros((), dtype=torch.float64), 0
                self._write(shown)
            if is_end and self.num_steps < self.num_total_steps:
                self._training = self._start_stage()
            if self.num_steps % self._checkpoint_every_steps == 0:
                self._save()
            yield shown

    def _update(self) -> Tensor:
        done = self.num_steps % self._steps
        for group in self._training.optimizer.param_groups:
            group.setdefault("first_lr", group["lr"])
            group["lr"] = group["first_lr"] * (1 - done / self._steps)
        generator = torch.Generator().manual_seed(self._seed + 7919 * (self.num_steps + 1))
        cost = self._training.step(self._draw(generator))
        self.num_steps += 1
        return cost

    def _write(self, cost: float) -> None:
        stage = (self.num_steps - 1) // self._steps
        if (self.num_steps - 1) % self._steps == 0:
            self._first_cost = cost
        if not cost <= _MOST_GROWTH * self._first_cost:  # nan neither
            raise UsageError(
                f"`lr` (={self._training_options['lr']}) is too high: the cost of stage {stage + 1}"
                f" is {cost:.4g} at step {self.num_steps}. Start anew with a lower one."
            )
        self._log.write(
            self.num_steps, stage, cost=cost, stage=stage + 1, samples_per_s=self.samples_per_s
        )
        self.costs[f"stage {stage + 1}"] = cost

    def _start_stage(self) -> "allstep.nn.StageTraining":
        index = self._index
        below, stage = nn.Sequential(*self._stages[:index]), self._stages[index]
        return allstep.nn.StageTraining(below, stage, **self._training_options)

    def _save(self) -> None:
        """Writes a checkpoint, of whole arrays; all workers call it."""
        is_between = self.num_steps % self._steps == 0 and self.num_steps < self.num_total_steps
        state = {
            "options": self._options,
            "costs": self.costs,
            "below": [stage.whole_filters() for stage in self._stages[: self._index]],
            "training": None if is_between else self._training.state(),
        }
        self._checkpoints.save(self.num_steps, state)

    def refuse_old_checkpoints(self) -> None:
        """Raises UsageError on every worker if the folder holds another run's checkpoints."""
        steps = self._checkpoints.saved_steps() if self._comm.rank == 0 else []
        if self._comm.broadcast_object(len(steps)):
            raise UsageError(
                f"`run_dir`: {self._checkpoints.folder} holds a run's checkpoints; resume that"
                " run, or take another folder."
            )

    def restore(self) -> None:
        """Goes on from the newest checkpoint; all workers call it.

        Raises:
            UsageError: if there is none, or if it is of another recipe.
        """
        loaded = self._checkpoints.load_latest()
        if loaded is None:
            raise UsageError(f"{self._checkpoints.folder} has no whole checkpoint to go on from.")
        self.num_steps, state = loaded
        for name, value in self._options.items():
            if state["options"].get(name) != value:
                raise UsageError(
                    f"`{name}` (={value}) differs from the checkpoint's"
                    f" (={state['options'].get(name)}); resume with that."
                )
        for stage, filters in zip(self._stages, state["below"], strict=False):
            stage.load_filters(filters)
        self.costs = dict(state["costs"])
        self._training = self._start_stage()
        if state["training"] is not None:
            self._training.load_state(state["training"])
