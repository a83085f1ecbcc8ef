"""What a run is made of on one worker, and how it is saved, restored and evaluated."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from allstep.comm import Communicator
from allstep.data import MapLoader, loader
from allstep.errors import CheckpointError, UsageError
from allstep.exchange import attach
from allstep.train.checkpoint import Checkpoints
from allstep.train.evaluator import Evaluator
from allstep.train.load_state import load_model_state, load_optimizer_state
from allstep.train.noise import NoiseProbe
from allstep.train.options import TrainOptions
from allstep.train.precision import Precision
from allstep.train.probe import probe
from allstep.train.stages import all_stages, num_samples_of, num_total_steps
from allstep.train.step import TrainStep
from allstep.train.task import Stage, Task

__all__ = ["Run"]

# What must not change between a run and its resumption.
_KEPT_OPTIONS = (
    "seed",
    "global_batch",
    "micro_batch",
    "drop_last",
    "precision",
    "wire",
    "staleness",
    "every",
)


class Run:
    """A task put together with a worker's device, data and checkpoints.

    Args:
        task: what to train.
        options: how.
        comm: the workers that train together.
        run_dir: the run's folder; checkpoints go in `run_dir/checkpoints`.
    """

    def __init__(
        self, task: Task, options: TrainOptions, comm: Communicator, run_dir: Path
    ) -> None:
        self._task = task
        self._options = options
        self._comm = comm
        self.precision = Precision(
            options.precision, comm.device, channels_last=options.channels_last
        )
        self._model = self.precision.prepare_model(task.model)
        self._optimizer = task.optimizer(self._model)
        called_model: nn.Module = self._model
        if options.compile:
            called_model = torch.compile(self._model)  # type: ignore[assignment]
        self.exchange = attach(
            self._model,
            comm,
            options.exchange_policy,
            global_batch=options.global_batch,
            scaler=self.precision.scaler,
            optimizer=self._optimizer,
        )
        self.noise = NoiseProbe(
            self._model.parameters(),
            self.exchange,
            self.precision,
            micro_batch=options.micro_batch,
            every_steps=options.noise_scale_every_steps,
        )
        self.train_step = TrainStep(
            task,
            called_model,
            self._optimizer,
            self.precision,
            self.exchange,
            self.noise,
            options.clip_norm,
            options.nonfinite,
        )
        self._stages = all_stages(task, options)
        self._enter(0)
        self._checkpoints = Checkpoints(
            run_dir / "checkpoints", comm, keep=options.keep_checkpoints
        )
        self.last_checkpoint: Path | None = None

    def _enter(self, stage_index: int) -> None:
        """Takes up a stage's data, from its beginning."""
        self._stage_index = stage_index
        options, stage = self._options, self.stage
        self.loader = loader(
            stage.train_set,
            self._comm,
            global_batch=stage.global_batch,
            micro_batch=stage.micro_batch,
            seed=options.seed,
            drop_last=options.drop_last,
            num_workers=options.loader_workers,
            collate_fn=self._task.collate_fn,
            pin_memory=self._comm.device.type == "cuda",
        )
        self._evaluator = Evaluator(
            lambda model, data: self._task.metrics(model, self.precision.prepare_data(data)),
            stage.test_set,
            self._comm,
            micro_batch=stage.micro_batch,
            num_workers=options.loader_workers,
            collate_fn=self._task.collate_fn,
            seed=options.seed,
        )
        self.noise.begin_stage(stage.micro_batch)
        self.train_step.first_data = None

    @property
    def stage(self) -> Stage:
        """The data that the run is at."""
        return self._stages[self._stage_index]

    def advance(self) -> bool:
        """Goes on to the next stage if its first epoch has come. All workers call it.

        Returns:
            Whether it did.
        """
        later = self._stages[self._stage_index + 1 :]
        if not later or self.loader.epoch < later[0].first_epoch:
            return False
        step = self.loader.step
        self.noise.flush(self._comm)  # what was measured with the old micro-batches
        self.loader.close()
        self._enter(self._stage_index + 1)
        # As if all epochs had been passes over these samples: epochs are counted on, and with
        # them the random states that begin with (seed, epoch).
        num_samples = self.stage.first_epoch * num_samples_of(self.stage)
        self.loader.load_state_dict({"samples": num_samples, "steps": step})
        return True

    @property
    def num_total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None for a stream, whose length isn't known."""
        if not isinstance(self.loader, MapLoader):
            return None
        return num_total_steps(self._stages, self._options)

    @property
    def totals(self) -> dict[str, tuple[float, float]]:
        """(sum, count) of each metric at the last evaluation."""
        return self._evaluator.totals

    def evaluate(self) -> dict[str, float]:
        """The metrics on the whole test set, each sample counted once. All workers call it."""
        self.exchange.sync_buffers()
        with self.precision.autocast():
            return self._evaluator(self._model)

    def flush(self) -> None:
        """Makes the updates whose gradients are still in flight. All workers call it."""
        for step in self.exchange.flush():
            self.train_step.update(step)

    def save(self) -> None:
        """Writes a checkpoint of everything that the next step depends on. All workers call it."""
        self.exchange.sync_buffers()
        self.noise.flush(self._comm)
        state = {
            "options": {name: getattr(self._options, name) for name in _KEPT_OPTIONS},
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "num_skipped": self.train_step.num_skipped,
            "stages": self._batches_of_stages(),
            "stage": self._stage_index,
            "loader": self.loader.state_dict(),
            "exchange": self.exchange.state_dict(),
            "noise_scale": self.noise.state_dict(),
        }
        self.last_checkpoint = self._checkpoints.save(self.loader.step, state)

    def refuse_old_checkpoints(self) -> None:
        """Raises on every worker if the folder holds another run's checkpoints.

        Raises:
            UsageError: naming the folder and the newest step.
        """
        steps = self._checkpoints.saved_steps() if self._comm.rank == 0 else []
        newest = self._comm.broadcast_object(max(steps, default=None), root=0)
        if newest is not None:
            raise UsageError(
                f"`run_dir`: {self._checkpoints.folder} holds a run's checkpoints (the newest of"
                f" step {newest}); resume that run, or take another folder."
            )

    def restore(self) -> None:
        """Continues from the newest checkpoint that is whole. All workers call it.

        Raises:
            CheckpointError: if there is none, or if it is of another model or other options.
        """
        loaded = self._checkpoints.load_latest()
        if loaded is None:
            raise CheckpointError(
                f"There is no whole checkpoint in {self._checkpoints.folder}: there is none, or all"
                " are damaged. Train anew, in another folder."
            )
        _, state = loaded
        self._check_options(state["options"])
        self._check_stages(state.get("stages"))
        load_model_state(self._model, state["model"])
        load_optimizer_state(self._optimizer, state["optimizer"])
        if state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])
        stage_index = state.get("stage", 0)
        if stage_index != self._stage_index:
            self.loader.close()
            self._enter(stage_index)
        self.loader.load_state_dict(state["loader"])
        self.exchange.load_state_dict(state["exchange"])
        self.noise.load_state_dict(state["noise_scale"])
        self.train_step.num_skipped = state.get("num_skipped", 0)

    def cost_of_sample(self) -> tuple[float, float]:
        """Floating-point operations and seconds of a sample on one worker alone.

        The seconds are those of compute and update, without waiting for data or workers.
        """
        stage = self.stage
        cost = probe(self._task, self.precision, self._comm, self.train_step.first_data)
        seconds = cost.compute_s / stage.micro_batch + cost.update_s / stage.global_batch
        return cost.flops / stage.micro_batch, seconds

    def close(self) -> None:
        """Stops the loader's processes and takes the exchange's hooks off the model."""
        self.loader.close()
        self.exchange.detach()

    def _check_options(self, saved: dict[str, Any]) -> None:
        for name in _KEPT_OPTIONS:
            wanted = getattr(self._options, name)
            if saved[name] != wanted:
                raise CheckpointError(
                    f"`{name}` (={wanted}) differs from the checkpoint's (={saved[name]}):"
                    " the run would not be the same. Resume with the checkpoint's value."
                )

    def _batches_of_stages(self) -> list[list[int]]:
        return [[s.first_epoch, s.global_batch, s.micro_batch] for s in self._stages]

    def _check_stages(self, saved: list[list[int]] | None) -> None:
        wanted = self._batches_of_stages()
        if saved is None:  # a checkpoint of a time without stages
            saved = wanted[:1]
        if [list(stage) for stage in saved] != wanted:
            raise CheckpointError(
                f"The stages (first epoch, global batch, micro-batch) {wanted} differ from the"
                f" checkpoint's {saved}: the run would not be the same. Resume with those."
            )
