"""Pipeline parallelism: a model in stages on several workers, by torch's pipeline schedules."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, groupby, zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from allstep.comm import Communicator, Mesh, StageModules, divided_modules
from allstep.comm.agreement import agree
from allstep.device import drawn_seed
from allstep.errors import UsageError, check_type
from allstep.nn.chain import fault_of_modules, seeded
from allstep.nn.pipeline_stages import MicroBatches, Stages, Values, in_words, shapes_of
from allstep.nn.replicated import seed_at
from allstep.torch_classes import is_dtensor

if TYPE_CHECKING:  # its import takes seconds
    from torch.distributed.pipelining.schedules import _PipelineSchedule

T = TypeVar("T")
Schedule = Literal["gpipe", "1f1b", "interleaved"]

_MOST_SCHEDULES = 8  # that are kept: each has memory for what its micro-batches receive


class Pipeline(nn.Module):
    """A model whose stages are divided over the workers along an axis of a mesh.

    `batch.run(model)` replaces the loop over a global batch's micro-batches. They all go through
    one of the schedules of `torch.distributed.pipelining`, and each loss is weighed as in
    `batch.backward`. Attach the model along another axis, `attach(model, mesh["data"])`: all
    workers along the pipeline get the same micro-batches, and exchange once a global batch.
    Torch's `fully_shard` may shard each of `stages` separately over that axis.

    [Note: stages] A stage's random numbers depend on the micro-batch and the stage's number: also
    in one process each stage is called under a random state of (seed, step, micro-batch, stage), so
    that dropout's masks are the same however many workers share the stages.

    Args:
        stages: modules, or functions that make them, which are called only on the workers that need
            them, each under a random state of its number; the same on all workers. Each stage takes
            the output of the previous one: a tensor or a tuple of tensors, of the same shapes for
            all micro-batches of equal shapes.
        mesh: a mesh of all workers of torch.distributed's default group, with an axis for data.
        loss: (output of the last stage, micro-batch) -> mean loss over its samples.
        inputs: micro-batch -> input of the first stage: a tensor, or a tuple of tensors.
        weight: micro-batch -> weight of its loss, which then is a sum; see `batch.backward`.
        axis: the mesh's axis over which the stages are divided: in contiguous blocks, or with
            "interleaved" in turns.
        schedule: torch's ScheduleGPipe ("gpipe"), Schedule1F1B ("1f1b") or
            ScheduleInterleaved1F1B ("interleaved"). The remainder (a last micro-batch with fewer
            samples, or fewer micro-batches than 1F1B takes) goes through in a separate run.

    Attributes:
        stages: this worker's modules, by their numbers among all.
        weight: as given.

    Raises:
        UsageError: before anything runs, if the number of stages is not divisible by the axis's
            length, if the schedule or axis doesn't exist, if stages share a parameter, or if one
            has batch norm's running statistics, or experts on workers that are not along an axis of
            the mesh.
        DisagreementError: if the pipelines differ between workers.

    Example:
        >>> import allstep
        >>> from torch.utils.data import TensorDataset
        >>> mesh = Communicator.single_process().mesh(data=1, pipeline=1)
        >>> stages = [nn.Linear(3, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 1))]
        >>> model = Pipeline(stages, mesh, loss=lambda y, batch: (y - batch[1]).square().mean())
        >>> exchange = allstep.attach(model, mesh["data"])
        >>> samples = TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
        >>> loader = allstep.data.loader(samples, mesh["data"], global_batch=4, micro_batch=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for batch in allstep.steps(loader, exchange):
        ...     batch.run(model)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | Callable[[], nn.Module]],
        mesh: Mesh[Communicator],
        *,
        loss: Callable[[Any, Any], Tensor],
        inputs: Callable[[Any], Values] = itemgetter(0),
        weight: Callable[[Any], float | Tensor] | None = None,
        axis: str = "pipeline",
        schedule: Schedule = "1f1b",
    ) -> None:
        super().__init__()
        check_type("mesh", mesh, Mesh, "`comm.mesh(data=1, pipeline=comm.size)`, say")
        self._comm = comm = mesh[axis]
        given = {str(i): s for i, s in enumerate(stages) if isinstance(s, nn.Module)}
        fault = _fault(len(stages), comm.size, schedule) or fault_of_modules("stage", given)
        agree(comm, "make a Pipeline", [("it", len(stages), schedule)], fault=fault)
        self.weight = weight
        self._schedule = schedule
        self._parts = _parts(len(stages), comm.rank, comm.size, schedule)
        self._num_parts = comm.size * len(self._parts)
        numbers = list(map(str, range(len(stages))))
        self.stages = StageModules(mesh, axis, numbers, can_be_sharded=True)
        if comm.size > 1:
            mesh.device_mesh()  # which all workers make together, before a stage may want it
        seed, made = drawn_seed(), {}
        for number in (number for part in self._parts for number in part):
            stage = stages[number]
            with seeded(seed_at(seed, number), comm.device):
                made[str(number)] = stage if isinstance(stage, nn.Module) else stage()
        fault = fault_of_modules("stage", made)
        if fault is None:
            self.stages.update(made)
            fault = _fault_of(self.stages)
        agree(comm, "make a Pipeline of these stages", fault=fault)
        self._expert_workers = _expert_workers_of(self.stages)
        self._micro_batches = MicroBatches(inputs, loss, comm.device)
        self._schedules: dict[Hashable, _PipelineSchedule] = {}

    @property
    def num_workers(self) -> int:
        """Number of workers that share the stages."""
        return self._comm.size

    @property
    def fewest_micro_batches(self) -> int:
        """The smallest number of micro-batches that the schedule takes."""
        return self._num_parts if self._schedule == "1f1b" else 1

    @property
    def keeps_in_step(self) -> bool:
        """Whether all copies must run equally many micro-batches. [Note: copies in step]"""
        return self._copies_in_step is not None

    @property
    def _copies_in_step(self) -> Communicator | None:
        """The workers with the same stages, one of each copy, if they wait for each other."""
        if self._expert_workers is not None:
            return self._expert_workers
        shard = next((p for p in self.stages.parameters() if is_dtensor(p)), None)
        if shard is None or shard.device_mesh.size() == 1:
            return None
        ranks = set(shard.device_mesh.mesh.flatten().tolist())
        mesh = self.stages.mesh
        axes = (n for n in mesh.shape if set(mesh.device_mesh()[n].mesh.tolist()) == ranks)
        name = next(axes, None)
        return None if name is None else mesh[name]

    def forward(self, *values: Tensor) -> Any:
        """The last stage's output, on a worker that has all stages. [Note: stages]

        Args:
            values: input of the first stage.

        Raises:
            UsageError: if the stages are on several workers, or if copies keep in step.
        """
        if self._comm.size > 1 or self.keeps_in_step:
            raise UsageError(
                "A Pipeline is not called: `batch.run(model)` runs all micro-batches of one item of"
                " `steps`, `model.evaluate(micro_batches)` gives losses without gradients, and"
                " `model.measure(function, micro_batch)` what a function makes of an output."
            )
        seed, found = drawn_seed(), values
        for number, stage in self.stages.items():
            with seeded(seed_at(seed, int(number)), self._comm.device):
                found = stage(*found) if isinstance(found, tuple) else stage(found)
        return found

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """The micro-batches' losses, on all workers that share the stages. Collective among them.

        Args:
            micro_batches: the same on all of them, on their devices.

        Returns:
            [n], float64. Call `eval()` before and `train()` after it, as for any module.
        """
        return self.run(micro_batches)

    @torch.no_grad()
    def measure(self, function: Callable[[nn.Module, Any], T], micro_batch: Any) -> T:
        """The result of a function of the whole model for a micro-batch. Collective.

        Args:
            function: (model, micro-batch) -> plain data or tensors; with several workers it is
                called on the last stage's worker, with a model that returns this model's output.
            micro_batch: the same on all workers that share the stages, on their devices.

        Returns:
            The result, on all workers. Call `eval()` before and `train()` after it, as for any
            module.
        """
        if self._comm.size == 1 and not self.keeps_in_step:
            return function(self, micro_batch)
        found: list[T] = []

        def look(output: Any, data: Any) -> Tensor:
            found[:] = [function(_Returns(output), data)]
            return torch.zeros((), device=self._comm.device)

        with self._micro_batches.looking(look):
            self.run([micro_batch])
        result: list[T] = self._comm.broadcast_object(found, root=self._comm.size - 1)
        return result[0]

    def run(
        self,
        micro_batches: Sequence[Any],
        *,
        seeds: Sequence[int] | None = None,
        factors: Sequence[float] | None = None,
        begin_backward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Runs micro-batches forward and, in grad mode, backward; `Batch.run` calls it.

        [Note: copies in step] If stages have experts on several workers, or FSDP2 has sharded them,
        all copies of the model run equally many micro-batches through the same schedule, so that
        all reach the same layers in the same order: copies with fewer micro-batches repeat one, or
        use one of another copy, without a loss; in these they only run their experts for others.

        Args:
            micro_batches: the same on all workers that share the stages.
            seeds: seeds of their random numbers; None to draw some.
            factors: factors of their losses in the gradients; None for 1.
            begin_backward: called when a stage's backward pass of a micro-batch begins.

        Returns:
            The losses, [n], float64, on all these workers.
        """
        n = len(micro_batches)
        if seeds is None:
            seeds = torch.randint(2**62, (n,)).tolist()
        runs = self._runs_of_shape(micro_batches)
        repeated = self._lengthen(runs, micro_batches)
        given = micro_batches, seeds, factors or [1.0] * n, repeated
        with self._micro_batches.begin(*given, begin_backward):
            self._run_portions([portion for run in runs for portion in self._portions_of(run)])
        losses = self._micro_batches.losses
        if self._comm.size > 1:
            self._comm.broadcast(losses, root=self._comm.size - 1)
        return losses

    def _runs_of_shape(self, micro_batches: Sequence[Any]) -> list[list[int]]:
        """Divides micro-batches into runs of equal shapes.

        Raises:
            UsageError: if the shapes of others than the last one differ.
        """
        shapes = [shapes_of(self._micro_batches.inputs_of(data)) for data in micro_batches]
        runs = [list(run) for _, run in groupby(range(len(shapes)), shapes.__getitem__)]
        if self._comm.size > 1 and len(runs) > 2:
            found = ", then ".join(in_words(shapes[run[0]]) for run in runs[:3])
            raise UsageError(
                f"The micro-batches of a global batch have inputs of {len(runs)} different shapes:"
                f" {found}. Those of one shape go through a pipeline together, and only the last"
                " ones may have another: pad them in the loader's `collate`."
            )
        return runs

    def _lengthen(self, runs: list[list[int]], micro_batches: Sequence[Any]) -> list[Values]:
        """Extends the runs to the length of the longest copy's. [Note: copies in step]

        Returns:
            The first stage's inputs of the added micro-batches, whose numbers follow the others'.
        """
        copies = self._copies_in_step
        if copies is None:
            return []
        by_copy = copies.all_gather_object([len(run) for run in runs])
        inputs = [self._micro_batches.inputs_of(data) for data in micro_batches]
        if any(by_copy) and not all(by_copy):
            root = next(rank for rank, lengths in enumerate(by_copy) if lengths)
            given: Any = inputs[0] if copies.rank == root else None
            inputs = [copies.broadcast(given, root)]
        repeated: list[Values] = []
        for place, lengths in enumerate(zip_longest(*by_copy, fillvalue=0)):
            if place == len(runs):
                runs.append([])
            run = runs[place]
            values = inputs[run[0] if run else 0]
            for _ in range(max(lengths) - len(run)):
                run.append(len(micro_batches) + len(repeated))
                repeated.append(values)
        return repeated

    def _portions_of(self, run: list[int]) -> Iterator[list[int]]:
        """The portions of a run that go through a schedule together."""
        for length in _lengths(len(run), self._comm.size, self._schedule):
            yield run[:length]
            run = run[length:]

    def _run_portions(self, portions: Sequence[list[int]]) -> None:
        if self._comm.size == 1:
            for numbers in portions:
                self._run_one_by_one(numbers)
            return
        trained = self._trained()
        shapes = self._micro_batches.shapes
        keys = [(trained, len(numbers), shapes(numbers[0])) for numbers in portions]
        is_new = [key not in self._schedules for key in keys]
        copies = self._copies_in_step
        if copies is not None:  # a new schedule calls stages once more
            by_copy = copies.all_gather_object(is_new)
            is_new = [any(of_copies) for of_copies in zip(*by_copy, strict=True)]
        for numbers, key, is_to_make in zip(portions, keys, is_new, strict=True):
            if is_to_make:
                self._schedules[key] = self._new_schedule(len(numbers))
            with self._keeping_gradients() if is_to_make else nullcontext():
                self._run_together(self._schedules[key], numbers)
        while len(self._schedules) > _MOST_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]

    @contextmanager
    def _keeping_gradients(self) -> Iterator[None]:
        """Restores gradients of FSDP2's modules: torch drops them when a schedule infers shapes."""
        parameters = list(self.stages.parameters())  # experts' are no shards, and dropped, too
        are_sharded = any(map(is_dtensor, parameters))
        held = [(p, p.grad) for p in parameters if are_sharded and p.grad is not None]
        for p, _ in held:
            p.grad = None
        yield
        for p, gradient in held:
            p.grad = gradient if p.grad is None else gradient.add_(p.grad)

    def _trained(self) -> Hashable:
        """Which parameters of all workers are trained; None without gradients.

        A schedule determines when it is made between which stages gradients flow, but layers may be
        frozen or thawed later.
        """
        if not torch.is_grad_enabled():
            return None
        own = tuple(p.requires_grad for p in self.stages.parameters())
        return tuple(self._comm.all_gather_object(hash(own)))

    def _run_one_by_one(self, numbers: list[int]) -> None:
        stages = self._stages(self._parts[0], has_fixed_shapes=False)
        for number in numbers:
            loss = self._micro_batches.weighed_loss(stages(number=number), number)
            if torch.is_grad_enabled():
                loss.backward()  # type: ignore[no-untyped-call]

    def _stages(self, part: range, *, has_fixed_shapes: bool) -> Stages:
        members = {number: self.stages[str(number)] for number in part}
        return Stages(
            members,
            self._micro_batches,
            has_fixed_shapes=has_fixed_shapes,
            are_sharded=any(map(is_dtensor, self.stages.parameters())),
        )

    def _run_together(self, schedule: "_PipelineSchedule", numbers: list[int]) -> None:
        """Runs torch's schedule, which gets the micro-batches' numbers in place of their data."""
        each = torch.tensor(numbers)
        args = (each,) if "0" in self.stages else ()
        call = schedule.step if torch.is_grad_enabled() else schedule.eval
        try:
            call(*args, number=each, target=each, return_outputs=False)
        except RuntimeError as error:  # torch's own, around what a stage has raised
            if isinstance(error.__cause__, UsageError):
                raise error.__cause__ from None
            if "only Tensors of floating point" in str(error):
                raise UsageError(
                    "A stage is sent whole numbers, which the pipelines of torch"
                    f" {torch.__version__} can't: use torch 2.13, or send numbers of a"
                    " floating-point dtype."
                ) from error
            raise

    def _new_schedule(self, num_micro_batches: int) -> "_PipelineSchedule":
        """Makes a schedule, which infers the shapes of messages between stages in its first run."""
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
        )

        rank, size = self._comm.rank, self._comm.size
        mesh, axis = self.stages.mesh, self.stages.axis
        stages = [
            PipelineStage(
                self._stages(part, has_fixed_shapes=True),
                number,
                self._num_parts,
                self._comm.device,
                group=mesh.device_mesh()[axis].get_group(),
            )
            for number, part in zip(range(rank, self._num_parts, size), self._parts, strict=True)
        ]
        loss = self._micro_batches.weighed_loss  # for which torch need not divide gradients
        if self._schedule == "interleaved":
            return ScheduleInterleaved1F1B(
                list(stages), num_micro_batches, loss_fn=loss, scale_grads=False
            )
        is_full = num_micro_batches >= self.fewest_micro_batches
        kind = Schedule1F1B if self._schedule == "1f1b" and is_full else ScheduleGPipe
        return kind(stages[0], num_micro_batches, loss_fn=loss, scale_grads=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_schedules": {}}  # a copy makes its own


def num_calls_of(model: nn.Module, num_micro_batches: int) -> int:
    """How often a worker calls a model for its micro-batches; a pipeline takes all in one call."""
    return 1 if isinstance(model, Pipeline) else num_micro_batches


class _Returns(nn.Module):
    """A model whose output is known."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any) -> Any:
        return self._output


def _fault(num_stages: int, size: int, schedule: str) -> str | None:
    """Why there is no such pipeline, in words.

    >>> _fault(3, 2, "1f1b")
    '`stages` are 3, which must be a multiple of the 2 workers along the axis.'
    """
    if schedule not in get_args(Schedule):
        listed = ", ".join(map(repr, get_args(Schedule)))
        return f"`schedule` (={schedule!r}) is none of {listed}."
    if num_stages == 0 or num_stages % size:
        workers = f"the {size} workers" if size > 1 else "the worker"
        return f"`stages` are {num_stages}, which must be a multiple of {workers} along the axis."
    return None


def _fault_of(stages: StageModules) -> str | None:
    """Why a stage can't be part of a pipeline."""
    for name, module in stages.named_modules(prefix="stages"):
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            return (
                f"`{name}` is a {type(module).__name__} with running statistics, which a pipeline"
                " doesn't keep for a global batch: use group or layer norm, or"
                " `track_running_stats=False`."
            )
    others = {n: axis for n, axis in _axes_of(stages.mesh).items() if n != stages.axis}
    for name, modules in divided_modules(stages).items():
        if not any(modules.workers is other for other in others.values()):
            return (
                f"`stages.{name}` has experts on {modules.workers.size} workers that are no other"
                f" axis of {stages.mesh}: make them with mesh[{next(iter(others), 'data')!r}]."
            )
    return None


def _axes_of(mesh: Mesh[Communicator]) -> dict[str, Communicator]:
    return {name: mesh[name] for name in mesh.shape}


def _expert_workers_of(stages: StageModules) -> Communicator | None:
    """The workers with the same stages, if any stage has experts on several of them. Collective.

    Raises:
        UsageError: if experts lie along several axes.
    """
    found = {modules.workers for modules in divided_modules(stages).values()}
    own = [name for name, axis in _axes_of(stages.mesh).items() if axis in found]
    names = list(dict.fromkeys(chain.from_iterable(stages.comm.all_gather_object(own))))
    if len(names) > 1:
        raise UsageError(
            f"`stages` have experts along {' and '.join(map(repr, names))}: take one axis for all."
        )
    return stages.mesh[names[0]] if names else None


def _parts(num_stages: int, rank: int, size: int, schedule: str) -> list[range]:
    """A worker's stages: each part goes through torch's schedule as one.

    >>> _parts(4, 1, 2, "1f1b"), _parts(4, 1, 2, "interleaved")
    ([range(2, 4)], [range(1, 2), range(3, 4)])
    """
    if schedule == "interleaved" and size > 1:
        return [range(number, number + 1) for number in range(rank, num_stages, size)]
    length = num_stages // size
    return [range(rank * length, (rank + 1) * length)]


def _lengths(num: int, size: int, schedule: str) -> list[int]:
    """How many micro-batches go through together.

    >>> _lengths(5, 2, "1f1b"), _lengths(5, 2, "interleaved"), _lengths(10, 4, "interleaved")
    ([5], [4, 1], [10])
    """
    if schedule == "interleaved" and num % max(1, num // size):
        return [num - num % size, num % size]
    return [num]
