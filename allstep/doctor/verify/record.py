"""What a worker writes down about a script's first steps, and all workers' notes of one run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from allstep.doctor.script import Failure
from allstep.doctor.verify.outputs import OutputSum
from allstep.doctor.verify.sketch import Sketch
from allstep.files import from_plain, read_json, write_json


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of an optimizer on one worker.

    Attributes:
        options: the numbers of each of the optimizer's parameter groups, such as `lr`.
        samples: a checksum of each sample that went through the model in training.
        local_gradients: of the worker's own samples, as they were before the exchange.
        gradients: what the optimizer found in `p.grad`.
        parameters: after the step.
        checksum: of the bits of the parameters.
        optimizer: which one it was, in the order of their first steps.
        input_shapes: of the first tensor of each call of the model in training.
        outputs: of the model's modules in training, by name, in the order of their first calls.
    """

    options: list[dict[str, float]]
    samples: list[int]
    local_gradients: dict[str, Sketch]
    gradients: dict[str, Sketch]
    parameters: dict[str, Sketch]
    checksum: int
    optimizer: int = 0
    input_shapes: list[list[int]] = field(default_factory=list)
    outputs: dict[str, OutputSum] = field(default_factory=dict)

    def option_name(self, key: str, group_index: int) -> str:
        """What to call an option of a parameter group; of the only optimizer, that is enough."""
        of = f" of optimizer {self.optimizer}" if self.optimizer else ""
        return f"{key} of parameter group {group_index}{of}"


@dataclass(kw_only=True)
class WorkerRecord:
    """All that one worker writes down.

    Attributes:
        rank: of the worker.
        place: among the workers that share a copy of the model, and its samples.
        copy: of the model, of which this worker has a part, or all.
        axes: name -> length, of the mesh's axes along which workers share a copy.
        shapes: of the whole parameters of attached models.
        parts: of which parameters this worker has a part, and the mesh's axis that they are cut
            along.
        same_parts: those of which all workers began with the same part.
        epsilon: rounding unit of the coarsest number format that the model computes in.
        policies: of the exchanges that don't send exact means at once, in words.
        num_attached: calls of `attach`.
        num_batch_norms: batch norm modules of the attached models.
        is_in_steps: whether all backward passes were in loops of `steps`.
        torch_seeds: when the first model was attached, and when it was first run.
        random_states: checksums of "Python" and "numpy" states when the first was attached.
        initial_parameters: when the first step begins.
    """

    rank: int
    place: int = 0
    copy: int = 0
    axes: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    same_parts: list[str] = field(default_factory=list)
    epsilon: float = 0.0
    policies: list[str] = field(default_factory=list)
    num_attached: int = 0
    num_batch_norms: int = 0
    is_in_steps: bool = True
    torch_seeds: list[int] = field(default_factory=list)
    random_states: dict[str, int] = field(default_factory=dict)
    initial_parameters: dict[str, Sketch] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    failure: Failure | None = None


@dataclass(frozen=True)
class RunRecord:
    """A script's first steps on some number of workers.

    Args:
        workers: what each of them wrote down, by rank.
        axes: name -> length, of the mesh that they were asked for; empty if only for a number.
    """

    workers: Sequence[WorkerRecord]
    axes: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.workers)

    def __str__(self) -> str:
        """>>> str(RunRecord([WorkerRecord(rank=0)]))
        '1 worker'
        """
        return run_text(self.size, self.axes)

    @property
    def first(self) -> WorkerRecord:
        """Rank 0's record."""
        return self.workers[0]

    @property
    def copies(self) -> Sequence[WorkerRecord]:
        """One worker's record of each copy of the model: they have samples of their own."""
        return [worker for worker in self.workers if worker.place == 0]

    @property
    def sharers(self) -> Sequence[WorkerRecord]:
        """The records of the workers that share rank 0's copy, and its samples."""
        if not self.first.axes:
            return [self.first]
        return [worker for worker in self.workers if worker.copy == self.first.copy]

    def shared_axes(self, name: str | None = None) -> str:
        """Axes along which workers share a copy, in words; the one that a tensor is cut along."""
        names = list(self.first.axes) if name is None else [self.first.parts[name]]
        return " and ".join(map(repr, names))

    @property
    def num_steps(self) -> int:
        """Steps that every worker made."""
        return min(len(worker.steps) for worker in self.workers)

    def before(self, step: int | None) -> "RunRecord":
        """The steps before one; all if None."""
        cut = [replace(worker, steps=worker.steps[:step]) for worker in self.workers]
        return replace(self, workers=cut)

    def samples(self, step: int) -> list[Counter[int]]:
        """The samples of a step, of each copy of the model."""
        return [Counter(worker.steps[step].samples) for worker in self.copies]

    def input_shapes(self, step: int) -> list[list[int]]:
        """The first inputs' shapes in a step, of all workers."""
        return [shape for worker in self.copies for shape in worker.steps[step].input_shapes]

    def all_samples(self, step: int) -> Counter[int]:
        """All workers' samples of a step."""
        return sum(self.samples(step), Counter())


def mesh_text(axes: Mapping[str, int]) -> str:
    """Axes of a mesh in words, without those of one worker if there are others.

    >>> mesh_text({"data": 2, "tensor": 4}), mesh_text({"data": 1, "tensor": 4})
    ('data=2 x tensor=4', 'tensor=4')
    """
    longer = {name: length for name, length in axes.items() if length > 1}
    return " x ".join(f"{name}={length}" for name, length in (longer or axes).items())


def run_text(size: int, axes: Mapping[str, int]) -> str:
    """A run's mesh in words, or its number of workers.

    >>> run_text(2, {}), run_text(2, {"data": 2})
    ('2 workers', 'data=2')
    """
    return mesh_text(axes) or f"{size} worker{'s' * (size > 1)}"


def write_worker(path: Path, worker: WorkerRecord) -> None:
    """Writes a record; the file is whole or not there."""
    write_json(path, asdict(worker), indent=None)


def read_worker(path: Path) -> WorkerRecord:
    """Reads what `write_worker` wrote."""
    found: WorkerRecord = from_plain(WorkerRecord, read_json(path))
    return found
