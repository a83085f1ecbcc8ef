"""The data-parallel training of a task: its parts on one worker, their state saved and loaded."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from allstep.comm import (
    Communicator,
    CompletedWork,
    divided_modules,
    fsdp_modules,
    shards_of,
    stages_of,
)
from allstep.comm.reproducible import sum_of_digits
from allstep.data import MapLoader, loader
from allstep.data.fetch import is_map_style
from allstep.device import has_streams
from allstep.errors import UsageError
from allstep.exchange import attach
from allstep.nn import Pipeline
from allstep.torch_classes import is_dtensor
from allstep.train.batch import seed_update
from allstep.train.divided import local_model, local_optimizer, whole_optimizer, whole_tensors
from allstep.train.elastic import StepCommit
from allstep.train.evaluator import Evaluator
from allstep.train.exchange_parts import gather_exchange, own_exchange
from allstep.train.fitting import (
    check_same,
    check_same_data,
    load_model_state,
    load_optimizer_state,
)
from allstep.train.noise import NoiseProbe
from allstep.train.options import TrainOptions
from allstep.train.own_loop import steps
from allstep.train.precision import Precision
from allstep.train.probe import probe
from allstep.train.shards import check_sharded, data_axis
from allstep.train.step import TrainStep, Update
from allstep.train.task import Metrics, Stage, Task, all_stages, num_samples_of, num_total_steps
from allstep.train.threads import Threads

# Options that must not change between a run and its resumption.
_KEPT_OPTIONS = (
    "seed",
    "global_batch",
    "micro_batch",
    "drop_last",
    "precision",
    "compression",
    "staleness",
    "sync_every",
)


class Run:
    """The `Training` of a task on a worker's device, with the worker's part of the data.

    Args:
        task: the task to train.
        options: its options.
        comm: the workers that train together, including those that share a copy of the model.
        elastic: the commit of elastic steps, if workers may come and go.

    Attributes:
        data_axis: the workers with the same part of the model and other samples.
    """

    def __init__(
        self,
        task: Task,
        options: TrainOptions,
        comm: Communicator,
        elastic: StepCommit | None = None,
    ) -> None:
        self._task = task
        self._options = options
        self._comm = comm
        self._elastic = elastic
        self._threads = Threads(options.threads, is_exact=options.is_exact, device=comm.device)
        self.precision = Precision(
            options.precision, comm.device, channels_last=options.channels_last
        )
        self._model = self.precision.prepare_model(task.model)
        _check_divided(self._model, options)
        self.data_axis = data_axis(self._model, comm)
        self._optimizer = task.optimizer(self._model)
        self.exchange = attach(
            self._model,
            self.data_axis,
            options.exchange_policy,
            global_batch=options.global_batch,
            scaler=self.precision.scaler,
            optimizer=self._optimizer,
        )
        try:
            self._prepare()
        except BaseException:
            self.exchange.detach()
            self._threads.give_back()
            raise

    def _prepare(self) -> None:
        """Makes the remaining parts, which the workers check together."""
        task, options, elastic = self._task, self._options, self._elastic
        self.noise = NoiseProbe(
            self.exchange,
            self.precision,
            micro_batch=options.micro_batch,
            every_steps=options.noise_scale_every_steps,
        )
        called_model: nn.Module = self._model
        if options.compile:
            called_model = torch.compile(self._model)  # type: ignore[assignment]
        self.train_step = TrainStep(
            task,
            called_model,
            self._optimizer,
            self.precision,
            self.exchange,
            self.noise,
            options.clip_norm,
            options.nonfinite,
            commit=CompletedWork if elastic is None else elastic.commit,
        )
        self._stages = all_stages(task, options)
        self._enter(0)
        self._before: dict[str, Any] = {}
        self._note_step_start()

    def _enter(self, stage_index: int) -> None:
        """Switches to a stage's data, from its beginning."""
        self._stage_index = stage_index
        options, stage = self._options, self.stage
        self.loader = loader(
            stage.train_set,
            self.data_axis,
            global_batch=stage.global_batch,
            micro_batch=stage.micro_batch,
            seed=options.seed,
            drop_last=options.drop_last,
            num_workers=options.loader_workers,
            shares=options.loader_shares,
            collate_fn=self._task.collate_fn,
            pin_memory=has_streams(self._comm.device),
        )
        self._evaluator = Evaluator(
            self._measure,
            stage.test_set,
            self.data_axis,
            micro_batch=stage.micro_batch,
            num_workers=options.loader_workers,
            collate_fn=self._task.collate_fn,
            seed=options.seed,
            shares=self.loader.shares,
        )
        self.noise.begin_stage(stage.micro_batch)
        self.train_step.begin_stage()

    @property
    def stage(self) -> Stage:
        """The present stage of the data."""
        return self._stages[self._stage_index]

    @property
    def is_elastic(self) -> bool:
        """Whether the training continues when workers come and go."""
        return self._elastic is not None

    @property
    def step(self) -> int:
        """Optimizer steps since the run's start."""
        return self.loader.step

    @property
    def epoch(self) -> int:
        """Whole passes over the data since the run's start."""
        return self.loader.epoch

    @property
    def num_total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None for a stream, whose length is unknown."""
        if not isinstance(self.loader, MapLoader):
            return None
        return num_total_steps(self._stages, self._options)

    def begin_epoch(self) -> bool:
        """Switches to the next stage if its first epoch has come; returns whether it did."""
        later = self._stages[self._stage_index + 1 :]
        if not later or self.epoch < later[0].first_epoch:
            return False
        step = self.step
        self.noise.flush(self.data_axis)  # measurements with the old micro-batches
        self.loader.close()
        self._enter(self._stage_index + 1)
        # As if all epochs had been passes over these samples: epochs are counted on, and with
        # them the random states that begin with (seed, epoch).
        num_samples = self.stage.first_epoch * num_samples_of(self.stage)
        self.loader.load_state_dict({"samples": num_samples, "steps": step})
        return True

    def updates(self) -> Iterator[Update]:
        """Makes the epoch's remaining updates, one each time that the next is requested."""
        for batch in steps(self.loader, self.exchange):
            update = self.train_step(batch)
            self._note_step_start()
            yield update
            if self._elastic is not None:
                self._elastic.let_in()

    def mean_loss(self, loss: Tensor, num_steps: int) -> float:
        """The mean loss over the steps since the last call; weighted sums are divided by weights.

        The message also carries the measurements of the gradients' noise.
        """
        if self._elastic is None:  # with `elastic` it is summed over all workers already
            loss = self.noise.all_reduce(self.data_axis, loss.flatten()).view_as(loss)
        total, weight = sum_of_digits(loss).tolist()
        return float(total / (weight or num_steps))

    def scalars(self, loss: float) -> dict[str, float]:
        """Scalars of the last step to log beside the loss."""
        return self.train_step.scalars | self.noise.scalars | self._micro_batches

    @property
    def _micro_batches(self) -> dict[str, float]:
        """Each worker's number of micro-batches in a full global batch, if not equal."""
        if self.loader.shares.is_equal:
            return {}
        parts = self.loader.shares.parts(self.loader.num_micro_batches)
        return {f"micro_batches/rank_{rank}": len(part) for rank, part in enumerate(parts)}

    @property
    def shares(self) -> str | None:
        """Which workers have fewer micro-batches and why, in words; None if all have the same."""
        return self.loader.shares.in_words(self.loader.num_micro_batches)

    def flush(self) -> bool:
        """Makes the updates whose gradients are still in flight. All workers call it.

        Returns:
            Whether there were any.
        """
        staleness, has_updated = self.exchange.policy.staleness, False
        for step in self.exchange.flush():
            seed_update(self._options.seed, step + staleness, self._comm.device)
            self.train_step.update(step)
            has_updated = True
        return has_updated

    @property
    def totals(self) -> dict[str, tuple[float, float]]:
        """(sum, count) of each metric at the last evaluation."""
        return self._evaluator.totals

    def evaluate(self) -> dict[str, float]:
        """The metrics on the whole test set, each sample counted once. All workers call it."""
        self.exchange.sync_buffers()
        with self.precision.autocast():
            return self._evaluator(self._model)

    def _measure(self, model: nn.Module, data: Any) -> Metrics:
        """A test micro-batch's sums and counts."""
        data = self.precision.prepare_data(data)
        if isinstance(model, Pipeline):
            return model.measure(self._task.metrics, data)
        return self._task.metrics(model, data)

    def metric_names(self) -> list[str]:
        """The names of `evaluate`'s metrics; all workers call it."""
        with self.precision.autocast():
            return self._evaluator.names(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on. All workers call it."""
        self.exchange.sync_buffers()
        self.noise.flush(self.data_axis)
        exchange = gather_exchange(self.exchange)
        return self._state(exchange, self.loader.state_dict())

    def state_at_step_start(self) -> dict[str, Any]:
        """The `state_dict` from before the step in progress, without communication.

        Its tensors share memory with the training's, except those that a step changes before its
        update. [Note: elastic training]
        """
        before = self._before
        state = self._state(before["exchange"], before["loader"])
        model = {n: before["buffers"].get(n, tensor) for n, tensor in state["model"].items()}
        return state | {"model": model, "stage": before["stage"]}

    def _note_step_start(self) -> None:
        """Saves what a step changes before its update."""
        if self._elastic is None:
            return
        buffers = self._model.named_buffers(remove_duplicate=False)  # as in the model's state
        self._before = {
            "buffers": {name: buffer.clone() for name, buffer in buffers},
            "stage": self._stage_index,
            "exchange": self.exchange.replicated_state(),
            "loader": self.loader.state_dict(),
        }

    def _state(self, exchange: dict[str, Any] | None, loader: dict[str, int]) -> dict[str, Any]:
        is_shared = self._comm.rank == 0 or self.exchange.averaging is None
        optimizer = whole_optimizer(self._model, self._optimizer)
        return {
            "options": self._kept_options(),
            "data": {"num_samples": self._num_samples(), **self._task.kept},
            "threads": self._threads.state_dict(),
            "model": whole_tensors(self._model, self._model.state_dict()),
            "optimizer": optimizer if is_shared else None,
            "scaler": self.precision.scaler.state_dict(),
            "num_skipped": self.train_step.num_skipped,
            "stage": self._stage_index,
            "loader": loader,
            "exchange": exchange,
            "noise_scale": self.noise.state_dict(),
        }

    def local_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a `state_dict` that this worker loads. All workers call it."""
        return {
            **state,
            "model": local_model(self._model, state["model"]),
            "optimizer": local_optimizer(self._model, self._optimizer, state["optimizer"]),
            "exchange": own_exchange(self.exchange, state["exchange"], {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `local_state` returned. All workers call it.

        Raises:
            CheckpointError: if it was saved with another model, other options or other data.
        """
        check_same_data(state, {"num_samples": self._num_samples()})
        self.load_trained(state)

    def load_trained(self, state: Mapping[str, Any]) -> None:
        """As `load_state_dict`, for a run that is only measured: on any number of samples.

        Raises:
            CheckpointError: if it was saved with another model, other options or another `kept`.
        """
        check_same(state["options"], self._kept_options())
        check_same_data(state, self._task.kept)
        self._threads.load_state_dict(state["threads"])
        load_model_state(self._model, state["model"])
        load_optimizer_state(self._optimizer, state["optimizer"])
        if state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])
        if state["stage"] != self._stage_index:
            self.loader.close()
            self._enter(state["stage"])
        self.loader.load_state_dict(state["loader"])
        self.exchange.load_state_dict(state["exchange"])
        self.noise.load_state_dict(state["noise_scale"])
        self.train_step.num_skipped = state["num_skipped"]
        self._note_step_start()

    def cost_of_sample(self) -> tuple[float | None, float] | None:
        """Floating-point operations and seconds per sample of a worker that has the machine.

        None if no worker has the whole model. The operations are None if they can't be counted.
        The seconds are those of compute and update, without waiting for data or workers. The worker
        uses all cores, unless the run fixes the number of threads.
        """
        if self.exchange.workers_with_other_parts:
            return None
        stage = self.stage
        data, num_threads = self.train_step.first_data, self._threads.num
        cost = probe(self._task, self.precision, self._comm, data, num_threads)
        seconds = cost.compute_s / stage.micro_batch + cost.update_s / stage.global_batch
        return cost.flops and cost.flops / stage.micro_batch, seconds

    def close(self) -> None:
        """Stops the loader's processes, removes the model's hooks, restores the threads' number."""
        self.loader.close()
        self.exchange.detach()
        self._threads.give_back()

    def _kept_options(self) -> dict[str, Any]:
        stages = [[s.first_epoch, s.global_batch, s.micro_batch] for s in self._stages]
        return {name: getattr(self._options, name) for name in _KEPT_OPTIONS} | {"stages": stages}

    def _num_samples(self) -> list[int | None]:
        """Samples in each stage's training set; None for a stream."""
        sets = [s.train_set for s in self._stages]
        return [len(each) if is_map_style(each) else None for each in sets]  # type: ignore[arg-type]


class MeasuredRun:
    """A run for `Checkpoints.restore` that is only measured and not continued.

    Args:
        run: the run; its training set may have grown since.
    """

    def __init__(self, run: Run) -> None:
        self.state_dict, self.local_state = run.state_dict, run.local_state
        self.load_state_dict = run.load_trained


def _check_divided(model: nn.Module, options: TrainOptions) -> None:
    """Refuses options that look at one worker's gradients, if others have parts of the model."""
    for name in shards_of(model):
        check_sharded(options, f"`task.model.{name}` is divided over workers")
    for name in stages_of(model):
        check_sharded(options, f"`task.model.{name}` lie on several workers")
    if fsdp_modules(model):
        check_sharded(options, "FSDP2 has sharded `task.model`")
        experts = [name for name, p in model.named_parameters() if not is_dtensor(p)]
        if options.precision == "float16" and experts:
            raise UsageError(
                f"`precision` (={options.precision!r}) needs a GradScaler, and torch's takes no"
                f" shards of FSDP2 together with experts (`{experts[0]}`): take 'bfloat16'."
            )
    for name in divided_modules(model):
        if every := options.noise_scale_every_steps:
            raise UsageError(
                f"`noise_scale_every_steps` (={every}) needs a micro-batch's whole gradient on one"
                f" worker, and `task.model.{name}` is divided over the workers: leave it out."
            )
