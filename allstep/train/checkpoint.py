"""A run's checkpoints: the newest few and the best are kept, the newest complete one is loaded."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from allstep.comm import Communicator
from allstep.comm.agreement import agree, digest_bytes, explain
from allstep.comm.layout import dtype_name, dtype_of_name
from allstep.errors import (
    AllstepError,
    CheckpointError,
    DisagreementError,
    UsageError,
    check_integer,
)
from allstep.exchange.state_sweep import tensor_checksums
from allstep.train.disk import LOCAL_DISK, Disk
from allstep.train.dtensors import divide_dtensors
from allstep.train.packing import divided_in, tensors_in
from allstep.train.pieces import Selection
from allstep.train.storage import (
    Stored,
    Sweeper,
    discard,
    in_memory,
    open_stored,
    write_checkpoint,
)
from allstep.train.tensor_files import FILE_BYTES, write_parts

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{8,})")

Select = Callable[[Any], Any]
"""Takes a checkpoint's state with its tensors on the "meta" device, gives what is wanted of it."""


class Stateful(Protocol):
    """An object whose state a checkpoint saves and loads, with torch's method names."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@runtime_checkable
class Divided(Protocol):
    """An object whose state is divided, so that each worker loads its own part of a checkpoint."""

    def local_state(self, state: Any, /) -> Any:
        """The part of the state that this worker's `load_state_dict` needs. Collective."""


class Checkpoints:
    """The checkpoints of one run, `folder/step-00000120` and so on, and `folder/best`.

    Only rank 0 touches the disk; the others receive what it reads, so that no shared file
    system is needed. If all workers see the folder, each writes its own parts of divided tensors;
    if not, rank 0 writes these, too, and holds only one piece at a time.
    [Note: writers of parts]

    Args:
        folder: the folder of the checkpoints; made at the first save.
        comm: the workers of the run.
        keep: number of newest checkpoints that are kept, at least 1; with 2 or more an older one is
            left if the disk damages the newest.
        message_bytes: tensors are stored, and sent to other workers, in groups of about this size.
        disk: the disk to write to.

    Raises:
        UsageError: if `keep` is not an integer, or below 1.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = Checkpoints(folder, Communicator.single_process())
        ...     path = checkpoints.save(120, {"lr": 0.1})
        ...     path.name, checkpoints.load_latest()
        ('step-00000120', (120, {'lr': 0.1}))
    """

    def __init__(
        self,
        folder: Path | str,
        comm: Communicator,
        *,
        keep: int = 3,
        message_bytes: int = FILE_BYTES,
        disk: Disk = LOCAL_DISK,
    ) -> None:
        check_integer("keep", keep, cure="2 or more is safer")
        self.folder = Path(folder)
        self._comm = comm
        self._keep = keep
        self._message_bytes = message_bytes
        self._disk, self._sweeper = disk, Sweeper(self.folder, disk)
        self._damaged: set[int] = set()

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / _name(step)

    @property
    def best_path(self) -> Path:
        """The folder of the best checkpoint, whether or not there is one."""
        return self.folder / "best"

    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints on this worker's disk, newest first, complete or not."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        steps = [int(match[1]) for match in matches if match and match[0] == _name(int(match[1]))]
        return sorted(steps, reverse=True)

    def save(self, step: int, state: Any) -> Path:
        """Writes a checkpoint, then deletes those that are too old. All workers call it.

        Other workers don't wait for rank 0; if it fails, or a worker that writes parts, only rank 0
        raises.

        Args:
            step: number of optimizer steps made.
            state: see `write_checkpoint`; rank 0's is stored. Tensors that other workers pass, too,
                must equal rank 0's; pass what differs between workers on rank 0 only, or as an
                `allstep.nn.DividedTensor`. Torch's DTensors are stored whole.

        Returns:
            The checkpoint's folder.

        Raises:
            UsageError: if `step` is not an integer of 0 or more, or if `state` holds something that
                can't be stored.
            CheckpointError: if it can't be written; older checkpoints are untouched.
            DisagreementError: on every worker, if the workers' tensors differ.
        """
        check_integer("step", step, 0)
        path = self.path(step)
        self._write(path, step, state)
        if self._comm.rank == 0:
            self._damaged.discard(step)
            self._delete_old(step)
        return path

    def save_best(self, step: int, state: Any) -> Path:
        """Writes the checkpoint `best`, in place of the previous one. All workers call it.

        It is kept until it is written again, however many newer checkpoints are saved.

        Args, Raises: as in `save`.

        Returns:
            The checkpoint's folder.
        """
        check_integer("step", step, 0)
        self._write(self.best_path, step, state)
        return self.best_path

    def _write(self, path: Path, step: int, state: Any) -> None:
        self._comm.activity.enter("checkpoint")
        state = divide_dtensors(state, self._comm)
        if self._comm.size > 1:
            self._check_same_state(step, state)
        if self._comm.rank > 0:
            write_parts(self._comm, self.folder, state, self._message_bytes, self._disk)
            return
        self._sweeper.sweep()
        write_checkpoint(
            path,
            state,
            step=int(step),  # it may be a numpy integer
            file_bytes=self._message_bytes,
            disk=self._disk,
            comm=self._comm,
        )

    def _check_same_state(self, step: int, state: Any) -> None:
        """Compares tensors: on loading, all workers get rank 0's, or a divided one's first copy."""
        divided = divided_in(state)
        action, mine = f"save a checkpoint of step {step}", tensor_checksums(tensors_in(state))
        parts = tensor_checksums(
            {
                f"{name} of rank {x.first_rank}": x.local
                for name, x in divided.items()
                if x.local is not None
            }
        )
        shapes = [(name, list(x.shape), dtype_name(x.dtype)) for name, x in divided.items()]
        with self._comm.announced.call(action):
            if len(set(agree(self._comm, action, shapes, told=digest_bytes((mine, parts))))) == 1:
                return
        by_rank = self._comm.all_gather_object((mine, parts))
        first, *others = (dict(whole) for whole, _ in by_rank)
        lost = {n for other in others for n, value in other.items() if first.get(n) != value}
        values: dict[str, str] = {}
        for name, value in chain.from_iterable(parts for _, parts in by_rank):
            if values.setdefault(name, value) != value:
                lost.add(name)
        if lost:
            words = explain(
                self._comm,
                action,
                [(name, value) for name, value in (*mine, *parts) if name in lost],
                cure="Rank 0's would be stored for all. Call `exchange.sync_buffers()` on every"
                " worker before, which makes batch norm's statistics equal and ends a round of"
                " local SGD; a model whose parts lie on several workers is saved by"
                " `allstep.AutoCheckpoint`, or given as `allstep.nn.DividedTensor`s.",
            )
            raise DisagreementError(words)

    def load_latest(self, select: Select | None = None) -> tuple[int, Any] | None:
        """Reads the newest complete checkpoint. All workers call it.

        Args:
            select: chooses the parts that this worker wants; None for all.

        Returns:
            The step and the state, its tensors on the CPU; None if no checkpoint is complete.

        Raises:
            CheckpointError: on every worker, if the folder can't be read.
        """
        return self._load(self._newest, select)

    def load_best(self, select: Select | None = None) -> tuple[int, Any] | None:
        """Reads the checkpoint that `save_best` wrote last. All workers call it.

        Args:
            select: chooses the parts that this worker wants; None for all.

        Returns:
            The step and the state, its tensors on the CPU; None if there is none.

        Raises:
            CheckpointError: on every worker, if it is damaged.
        """
        return self._load(self._best, select)

    def _load(
        self, find: Callable[[], AbstractContextManager[Stored | None]], select: Select | None
    ) -> tuple[int, Any] | None:
        self._comm.activity.enter("load of a checkpoint")
        if self._comm.rank > 0:
            return _receive(self._comm, select)
        with ExitStack() as opened:
            try:
                found = opened.enter_context(find())
            except Exception as error:
                self._comm.broadcast_object({"error": f"rank 0 could not load: {error}"})
                raise
            if found is None:
                self._comm.broadcast_object({})
                return None
            _send_index(self._comm, found)
            selection = found.select(select)  # which may be collective
            _send_tensors(self._comm, found, partial(selection.take, copy=False))
            return found.step, selection.state()

    def restore(
        self,
        target: Stateful,
        *,
        missing_ok: bool = False,
        best: bool = False,
        step: int | None = None,
    ) -> int | None:
        """Loads the newest complete checkpoint into `target`. All workers call it.

        Args:
            target: the object that was saved.
            best: load the best checkpoint instead.
            step: load the checkpoint of this step instead.
            missing_ok: if the folder has no checkpoint at all, leave `target` as it is.

        Returns:
            The checkpoint's step; None if there is none.

        Raises:
            CheckpointError: if there is none, or if it does not fit.
        """
        if missing_ok:
            newest, has_best = self._existing()
            is_there = has_best if best else newest is not None
            if not is_there:
                return None
        select = target.local_state if isinstance(target, Divided) else None
        with self._misfit_named(self.best_path if best else self.folder):
            if step is not None:
                loaded = self._load(partial(open_stored, self.path(step)), select)
            else:
                loaded = self.load_best(select) if best else self.load_latest(select)
        if loaded is None and best:
            raise CheckpointError(
                f"There is no {self.best_path}: a run keeps its best checkpoint if it is told"
                " its `best_metric`, from the first evaluation on in which that is a number. Take"
                " the newest."
            )
        if loaded is None:
            raise CheckpointError(
                f"There is no whole checkpoint in {self.folder}: there is none, or all are"
                " damaged. Train anew, in another folder."
            )
        found_step, state = loaded
        with self._misfit_named(self.best_path if best else self.path(found_step)):
            target.load_state_dict(state)
        return found_step

    @contextmanager
    def _misfit_named(self, path: Path) -> Iterator[None]:
        """Turns the error that another object's state raises into a CheckpointError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, AllstepError):
                raise
            raise CheckpointError(
                f"{path} does not fit this training ({type(error).__name__}: {error}). Resume with"
                " what wrote it, or train anew, in another folder."
            ) from error

    def refuse_existing(self) -> None:
        """Raises on every worker if the folder holds another run's checkpoints.

        Raises:
            UsageError: naming the folder and the newest step.
        """
        newest, has_best = self._existing()
        if newest is not None or has_best:
            which = "`best` only" if newest is None else f"the newest of step {newest}"
            raise UsageError(
                f"`run_dir`: {self.folder} holds a run's checkpoints ({which}); resume that run,"
                " or take another folder."
            )

    def _existing(self) -> tuple[int | None, bool]:
        """The newest step on rank 0's disk and whether there is a best one, complete or not.

        All workers call it.
        """
        found = None
        if self._comm.rank == 0:
            self._sweeper.sweep()  # restores what a writer that died had moved aside
            found = max(self.saved_steps(), default=None), self.best_path.exists()
        newest, has_best = self._comm.broadcast_object(found)
        return newest, has_best

    @contextmanager
    def _newest(self) -> Iterator[Stored | None]:
        self._sweeper.sweep()
        reasons: list[str] = []
        with ExitStack() as opened:
            found = None
            for step in self.saved_steps():
                try:
                    found = opened.enter_context(open_stored(self.path(step)))
                    if found.step != step:
                        raise CheckpointError(f"{_name(step)}: holds step {found.step}")
                    break
                except CheckpointError as error:
                    found = None
                    self._damaged.add(step)
                    reasons.append(str(error))
            use = "there is no older one" if found is None else f"using {_name(found.step)}"
            for reason in reasons:
                _logger.warning("%s; %s", reason, use)
            yield found

    @contextmanager
    def _best(self) -> Iterator[Stored | None]:
        self._sweeper.sweep()
        if not self.best_path.exists():
            yield None
            return
        with ExitStack() as opened:
            try:
                found = opened.enter_context(open_stored(self.best_path))
            except CheckpointError:  # a run that goes on may have replaced it meanwhile
                found = opened.enter_context(open_stored(self.best_path))
            yield found

    def _delete_old(self, step: int) -> None:
        """Deletes all but the newest complete checkpoints up to `step`.

        A checkpoint of a later step is damaged or from a run that was rewound; it is not older than
        the one just written, so it stays until the run has passed it.
        """
        steps = [s for s in self.saved_steps() if s <= step]
        for damaged in self._damaged.intersection(steps):
            _logger.warning("deleting the damaged %s, a newer one is complete", self.path(damaged))
            self._damaged.discard(damaged)
            steps.remove(damaged)
            self._discard(damaged)
        for old in steps[self._keep :]:
            self._discard(old)

    def _discard(self, step: int) -> None:
        """Deletes a checkpoint; if that fails, the next `save` tries again."""
        path = self.path(step)
        try:
            discard(path, self._disk)
        except OSError as error:
            if path.exists():  # else a worker that the others left behind has deleted it
                _logger.warning("%s could not be deleted (%s)", path, error)


def send_state(comm: Communicator, state: Any) -> None:
    """Sends a state from rank 0 to all workers; the others call `receive_state`."""
    found = in_memory(state)
    _send_index(comm, found)
    _send_tensors(comm, found)


def receive_state(comm: Communicator) -> Any:
    """The state that rank 0 sends, its tensors on the CPU."""
    received = _receive(comm)
    assert received is not None
    return received[1]


def _receive(comm: Communicator, select: Select | None = None) -> tuple[int, Any] | None:
    """The step and the state of a checkpoint that rank 0 sends; None if it has none.

    Raises:
        CheckpointError: if rank 0 could not read it.
    """
    found = comm.broadcast_object()
    if "error" in found:
        raise CheckpointError(found["error"])
    if not found:
        return None
    groups = [
        {n: torch.empty(shape, dtype=dtype_of_name(x), device="meta") for n, shape, x in group}
        for group in found["index"]
    ]
    selection = Selection(found["data"], groups, select)
    for group in filter(None, groups):
        for name, tensor in zip(group, comm.broadcast(), strict=True):
            selection.take(name, tensor.cpu(), copy=True)
    return found["step"], selection.state()


def _send_index(comm: Communicator, found: Stored) -> None:
    """Tells all workers what is stored."""
    index = [
        [(name, list(x.shape), dtype_name(x.dtype)) for name, x in group.items()]
        for group in found.index
    ]
    comm.broadcast_object({"step": found.step, "data": found.data, "index": index})


def _send_tensors(
    comm: Communicator,
    found: Stored,
    take: Callable[[str, Tensor], object] = lambda name, tensor: None,
) -> None:
    """Sends the tensors, one file at a time; rank 0 may take them, too."""
    for number, group in enumerate(found.index):
        if group:
            tensors = found.load(number)
            comm.broadcast(tuple(tensors[name] for name in group))
            for name in group:
                take(name, tensors[name])


def _name(step: int) -> str:
    return f"step-{step:08d}"
