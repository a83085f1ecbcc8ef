"""The greedy training of recipe `cots`, in the form that the common training loop takes."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, UsageError

_MOST_GROWTH = 10  # largest factor by which the cost may grow in a stage; it should fall


class GreedyTraining:
    """Trains stage after stage, `steps` updates each, with a rate that falls linearly to zero.

    It is an `allstep.train.Training` in which a stage is an epoch. Every worker draws the same
    samples; a net uses its share of them, and a worker its part of each. An update depends only on
    the seed, its number and the state, so any number of workers can continue from a checkpoint.

    Args:
        stages: the stages of the net.
        draw: generator -> this worker's part of a batch.
        mesh: the workers: nets with different samples along `data`, parts of a net along `model`.
        batch: samples of an update, of all nets together.
        steps: updates of a stage.
        seed: seed of the samples.
        training: `lr`, `momentum`, `sparsity` and `tied` of `allstep.nn.StageTraining`.
        options: options as plain data; a checkpoint with different ones is rejected.

    Attributes:
        step: number of updates so far, of all stages.
        costs: name of each stage -> its last mean cost.
    """

    def __init__(
        self,
        stages: "list[allstep.nn.AutoencoderStage]",
        draw: Callable[[torch.Generator], Tensor],
        mesh: "allstep.comm.Mesh[Communicator]",
        *,
        batch: int,
        steps: int,
        seed: int,
        training: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._stages = stages
        self._draw = draw
        self._comm, self._data = mesh.comm, mesh["data"]
        first, end = (batch * (self._data.rank + i) // self._data.size for i in (0, 1))
        self._share = slice(first, end)
        self._batch = batch
        self._steps = steps
        self._seed = seed
        self._training_options = training
        self._options = options
        self._training: allstep.nn.StageTraining | None = None  # training of the present stage
        self._exchange: allstep.Exchange | None = None
        self._rates: list[float] = []
        self._first_cost = math.inf
        self.step = 0
        self.costs: dict[str, float] = {}

    @property
    def epoch(self) -> int:
        """Number of stages that are finished."""
        return self.step // self._steps

    @property
    def num_total_steps(self) -> int:
        """Updates of the whole run."""
        return self._steps * len(self._stages)

    def begin_epoch(self) -> bool:
        """Starts the stage, unless it was resumed within it."""
        if self.step % self._steps == 0:
            self._training = self._start_stage()
        return False

    def updates(self) -> "Iterator[allstep.train.Update]":
        """An iterator that makes the rest of the stage's updates, one per item."""
        stage, training = self.epoch, self._training
        assert training is not None
        while self.epoch == stage:
            done = self.step % self._steps
            for group, rate in zip(training.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * (1 - done / self._steps)
            generator = torch.Generator().manual_seed(self._seed + 7919 * (self.step + 1))
            cost = training.step(self._draw(generator)[self._share])
            self.step += 1
            yield allstep.train.Update(
                loss=cost.double().cpu(),
                epoch=stage,
                num_samples=self._batch,
                is_logged=done in (0, self._steps - 1),
            )

    def mean_loss(self, loss: Tensor, num_steps: int) -> float:
        """The loss summed over the workers and averaged over the steps."""
        return float(self._comm.all_reduce(loss)) / num_steps

    def scalars(self, loss: float) -> dict[str, float]:
        """The number of the stage, from 1, for the log; also checks and records the cost.

        Raises:
            UsageError: if the cost has grown too much, or is NaN.
        """
        done, stage = (self.step - 1) % self._steps, (self.step - 1) // self._steps + 1
        if done == 0:
            self._first_cost = loss
        if not loss <= _MOST_GROWTH * self._first_cost:  # also true of NaN
            raise UsageError(
                f"`lr` (={self._training_options['lr']}) is too high: the cost of stage {stage}"
                f" is {loss:.4g} at step {self.step}. Start anew with a lower one."
            )
        self.costs[f"stage {stage}"] = loss
        return {"stage": stage}

    def flush(self) -> bool:
        """Does nothing, as no update is pending."""
        return False

    def evaluate(self) -> dict[str, float]:
        """No metrics: the neurons are tested after all stages."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The filters of the finished stages, and the state of the present stage's training."""
        is_between = self.step % self._steps == 0
        training = None if is_between or self._training is None else self._training.state()
        return {
            "options": self._options,
            "step": self.step,
            "costs": self.costs,
            "below": [self._filters(stage) for stage in self._stages[: self.epoch]],
            "training": training,
        }

    def local_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This worker's parts of what `state_dict` returned.

        Raises:
            CheckpointError: if it is from a training with other options.
        """
        allstep.train.check_same(state["options"], self._options)
        stages, training = self._stages, state["training"]
        if training is not None:
            part = stages[len(state["below"])].local_part
            training = {name: part(x) for name, x in training.items()}
        below = [stage.local_part(x) for stage, x in zip(stages, state["below"], strict=False)]
        return {**state, "below": below, "training": training}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `local_state` returned."""
        self.step = state["step"]
        for stage, filters in zip(self._stages, state["below"], strict=False):
            stage.filtering.weight.copy_(filters)
        self.costs = dict(state["costs"])
        if state["training"] is not None:
            self._training = self._start_stage()
            self._training.load_state(state["training"])

    def _filters(self, stage: "allstep.nn.AutoencoderStage") -> "allstep.nn.DividedTensor":
        return stage.divided(stage.filtering.weight, is_first_copy=self._data.rank == 0)

    def _start_stage(self) -> "allstep.nn.StageTraining":
        below, stage = nn.Sequential(*self._stages[: self.epoch]), self._stages[self.epoch]
        training = allstep.nn.StageTraining(
            below, stage, data=self._data, batch=self._batch, **self._training_options
        )
        if self._exchange is not None:
            self._exchange.detach()
        if self._data.size > 1:
            self._exchange = allstep.attach(training.autoencoder, self._data)
        self._rates = [group["lr"] for group in training.optimizer.param_groups]
        return training
