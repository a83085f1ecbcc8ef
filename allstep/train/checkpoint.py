"""A run's checkpoints: the newest few are kept, the newest that is whole is used."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import CheckpointError, UsageError
from allstep.train.checkpoint_files import (
    discard,
    read_checkpoint,
    read_parts,
    sweep,
    verify,
    write_checkpoint,
)
from allstep.train.load_state import load_model_state, load_optimizer_state
from allstep.train.manifest import Manifest
from allstep.train.state_tree import unflatten

__all__ = [
    "Checkpoints",
    "load_model_state",
    "load_optimizer_state",
    "read_checkpoint",
    "verify",
    "write_checkpoint",
]

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{8,})")
_MESSAGE_BYTES = 256 << 20  # tensors are broadcast in groups of about this size


class Checkpoints:
    """The checkpoints of one run, `folder/step-00000120` and so on.

    Only rank 0 touches the disk; the others receive what it reads, so that no shared file
    system is needed.

    Args:
        folder: where they are; made at the first save.
        comm: the workers of the run.
        keep: how many of the newest stay, >= 1; with 2 or more there is one left to go back to
            when the disk damages the newest.

    Raises:
        UsageError: if `keep` is below 1.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = Checkpoints(folder, Communicator.single_process())
        ...     path = checkpoints.save(120, {"lr": 0.1})
        ...     path.name, checkpoints.load_latest()
        ('step-00000120', (120, {'lr': 0.1}))
    """

    def __init__(self, folder: Path | str, comm: Communicator, *, keep: int = 3) -> None:
        if keep < 1:
            raise UsageError(f"`keep` (={keep}) must be at least 1; 2 or more is safer.")
        self.folder = Path(folder)
        self._comm = comm
        self._keep = keep
        self._damaged: set[int] = set()

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def saved_steps(self) -> list[int]:
        """Steps with a checkpoint on this worker's disk, the newest first, whole or not."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def save(self, step: int, state: Any) -> Path:
        """Writes a checkpoint, then deletes those that are too old. All workers call it.

        Nobody waits for the writer; if it fails, only rank 0 raises.

        Args:
            step: optimizer steps done.
            state: see `write_checkpoint`; used on rank 0 only.

        Returns:
            The checkpoint's folder.

        Raises:
            UsageError: if `state` holds what can't be stored.
            CheckpointError: if it can't be written; older ones are untouched.
        """
        path = self.path(step)
        if self._comm.rank == 0:
            sweep(self.folder)
            write_checkpoint(path, state, step=step)
            self._damaged.discard(step)
            self._delete_old(step)
        return path

    def load_latest(self) -> tuple[int, Any] | None:
        """Reads the newest checkpoint that is whole. All workers call it.

        Returns:
            The step and the state, its tensors on the CPU; None if there is no whole one.

        Raises:
            CheckpointError: on every worker, if the folder can't be read.
        """
        if self._comm.rank == 0:
            try:
                found = self._read_newest()
            except Exception as error:
                self._comm.broadcast_object({"error": f"rank 0 could not load: {error}"})
                raise
            return self._send(found)
        return self._receive()

    def _read_newest(self) -> tuple[Manifest, dict[str, Tensor]] | None:
        sweep(self.folder)
        reasons: list[str] = []
        for step in self.saved_steps():
            try:
                found = read_parts(self.path(step))
            except CheckpointError as error:
                self._damaged.add(step)
                reasons.append(str(error))
                continue
            for reason in reasons:
                _logger.warning("%s; using %s", reason, self.path(step).name)
            return found
        for reason in reasons:
            _logger.warning("%s; there is no older one", reason)
        return None

    def _send(self, found: tuple[Manifest, dict[str, Tensor]] | None) -> tuple[int, Any] | None:
        if found is None:
            self._comm.broadcast_object({})
            return None
        manifest, tensors = found
        groups = list(_groups(tensors))
        skeleton = json.dumps(manifest.state)
        self._comm.broadcast_object({"step": manifest.step, "state": skeleton, "names": groups})
        for names in groups:
            self._comm.broadcast(tuple(tensors[name] for name in names))
        return manifest.step, unflatten(manifest.state, tensors)

    def _receive(self) -> tuple[int, Any] | None:
        found = self._comm.broadcast_object()
        if "error" in found:
            raise CheckpointError(found["error"])
        if not found:
            return None
        tensors: dict[str, Tensor] = {}
        for names in found["names"]:
            received = self._comm.broadcast()
            # a clone each, for they are views of one message
            tensors.update({n: t.cpu().clone() for n, t in zip(names, received, strict=True)})
        return found["step"], unflatten(json.loads(found["state"]), tensors)

    def _delete_old(self, step: int) -> None:
        """Keeps the newest whole ones up to `step`.

        One of a later step is damaged or from a run that was rewound; it is not older than
        the one just written, so it stays until the run has passed it.
        """
        steps = [s for s in self.saved_steps() if s <= step]
        for damaged in self._damaged.intersection(steps):
            _logger.warning("deleting the damaged %s, a newer one is complete", self.path(damaged))
            self._damaged.discard(damaged)
            steps.remove(damaged)
            discard(self.path(damaged))
        for old in steps[self._keep :]:
            discard(self.path(old))


def _groups(tensors: dict[str, Tensor]) -> Iterator[list[str]]:
    """The tensors' names in groups that are sent at once."""
    group: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if group and num_bytes + tensor.nbytes > _MESSAGE_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(name)
        num_bytes += tensor.nbytes
    if group:
        yield group
