"""One checkpoint on disk: written so that it is there whole or not at all, read with checks.

[Note: atomic checkpoint] A checkpoint is a folder with `tensors.safetensors`, `state.msgpack` (what
is no tensor) and `manifest.json`, which has their checksums and its own. It is written under
another name, `.tmp-NAME-HOST-PID`, each file is synced, and the folder is renamed when it is
complete; so a folder with the right name is whole unless the disk damaged it, which the checksums
tell. One that stands in the way is renamed `.old-NAME` first and comes back if the writer dies
before the new one is in place. What dead writers leave is swept away later.
"""

import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from allstep import __version__
from allstep.errors import CheckpointError, CommunicationError
from allstep.train.devices import is_alive
from allstep.train.packing import pack, unpack

_FORMAT = 1
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.msgpack", "manifest.json"
_TEMPORARY = re.compile(r"\.tmp-(?P<name>.+)-(?P<host>[^-]+)-(?P<pid>\d+)")
_ASIDE = ".old-"
_FOREIGN_LEFTOVER_AGE_S = 3600.0  # another host's processes cannot be asked whether they live


@dataclass(frozen=True)
class Stored:
    """A checkpoint's parts: the step, the encoded state, and its tensors."""

    step: int
    data: bytes
    tensors: dict[str, Tensor]

    def unpack(self) -> Any:
        """The state."""
        return unpack(self.data, self.tensors)


def write_checkpoint(path: Path | str, state: Any, *, step: int = 0) -> None:
    """Writes a state as the folder `path`, replacing what is there; see [Note: atomic checkpoint].

    Args:
        path: the folder to make.
        state: nested dicts, lists, tuples and sets of None, numbers, texts, bytes, numpy arrays
            and dense tensors.
        step: optimizer steps done.

    Raises:
        UsageError: if `state` holds anything else; the message names its path.
        CheckpointError: if the disk is full or can't be written; nothing has changed then.
    """
    path = Path(path)
    stored = Stored(step, *pack(state))
    temporary = _temporary(path)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write_files(temporary, stored)
        _put_in_place(temporary, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}). Free some space or choose another folder; "
            "older checkpoints are untouched."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # it is no more if all went well


def read_checkpoint(path: Path | str) -> Any:
    """Reads and checks the state that `write_checkpoint` wrote; tensors are on the CPU.

    Raises:
        CheckpointError: if a file is missing or does not match its checksum.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "step-00000003"
    >>> write_checkpoint(folder, {"weight": torch.ones(2), "rates": (0.1, None)})
    >>> read_checkpoint(folder)
    {'weight': tensor([1., 1.]), 'rates': (0.1, None)}
    """
    return read_stored(path).unpack()


def read_stored(path: Path | str) -> Stored:
    """The checked parts of a checkpoint; see `read_checkpoint`."""
    path = Path(path)
    step = verify(path)["step"]
    with _damage_named(path):
        data = (path / _STATE).read_bytes()
        stored = Stored(step, data, safetensors.torch.load_file(path / _TENSORS))
        stored.unpack()  # checksums prove that nothing changed, not that the writer was right
    return stored


def verify(path: Path | str) -> dict[str, Any]:
    """Checks every file of a checkpoint against its checksum.

    Returns:
        The manifest: `format`, `step`, `date` (ISO 8601 in UTC), the versions of `allstep` and
        `torch` that wrote it, and size and checksum of its `files`.

    Raises:
        CheckpointError: naming the checkpoint, the file and what is wrong with it.
    """
    path = Path(path)
    with _damage_named(path):
        manifest = _read_manifest(path)
        for name in (_TENSORS, _STATE):
            if name not in manifest["files"]:
                raise CheckpointError(f"{_MANIFEST} does not list {name}")
            _check_file(path / name, manifest["files"][name])
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes `manifest.json` with a checksum of itself."""
    (folder / _MANIFEST).write_bytes(_sealed(manifest))


def discard(path: Path) -> None:
    """Deletes a checkpoint; if that is cut short, no half of it stays under its name."""
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)
    os.rename(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes what dead writers left, and puts back what they had moved aside.

    The caller must not be writing in `folder` at the same time; others may.
    """
    for path in folder.glob(".tmp-*"):
        if _is_left_over(path):
            shutil.rmtree(path, ignore_errors=True)
    for aside in folder.glob(f"{_ASIDE}*"):
        path = folder / aside.name.removeprefix(_ASIDE)
        with contextlib.suppress(OSError):  # a living writer was quicker
            if path.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.rename(aside, path)


def _write_files(folder: Path, stored: Stored) -> None:
    safetensors.torch.save_file(stored.tensors, folder / _TENSORS)
    (folder / _STATE).write_bytes(stored.data)
    manifest = {
        "format": _FORMAT,
        "step": stored.step,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "allstep": __version__,
        "torch": str(torch.__version__),
        "files": {name: _digest(folder / name) for name in (_TENSORS, _STATE)},
    }
    write_manifest(folder, manifest)
    for path in (folder / _TENSORS, folder / _STATE, folder / _MANIFEST, folder):
        _sync(path)


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / _MANIFEST).exists():
        raise CheckpointError(f"{_MANIFEST} is missing")
    data = (folder / _MANIFEST).read_bytes()
    try:
        manifest: dict[str, Any] = json.loads(data)
        del manifest["sha256"]
        is_whole = _sealed(manifest) == data
    except (ValueError, TypeError, LookupError):
        is_whole = False
    if not is_whole:
        raise CheckpointError(f"{_MANIFEST} does not match its checksum")
    if manifest["format"] != _FORMAT:
        raise CheckpointError(
            f"{_MANIFEST} is of format {manifest['format']}, this allstep reads format {_FORMAT}"
        )
    return manifest


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The file's contents, with a checksum of the rest."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({"sha256": digest} | manifest, indent=1).encode() + b"\n"


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing")
    size_bytes = path.stat().st_size
    if size_bytes != expected["size_bytes"]:
        raise CheckpointError(
            f"{path.name} has {size_bytes:,} bytes instead of {expected['size_bytes']:,}"
        )
    if _digest(path) != expected:
        raise CheckpointError(f"{path.name} does not match its checksum")


def _digest(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size_bytes": path.stat().st_size, "sha256": digest}


def _put_in_place(temporary: Path, path: Path) -> None:
    aside = path.with_name(_ASIDE + path.name)
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
    os.rename(temporary, path)
    _sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _temporary(path: Path) -> Path:
    host = socket.gethostname().replace("-", "_")
    return path.with_name(f".tmp-{path.name}-{host}-{os.getpid()}")


def _is_left_over(path: Path) -> bool:
    """Whether the writer of a temporary folder is gone."""
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    if match["host"] == socket.gethostname().replace("-", "_"):
        pid = int(match["pid"])
        return pid == os.getpid() or not is_alive(pid)
    try:
        newest_s = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:  # its writer is busy with it
        return False
    return time.time() - newest_s > _FOREIGN_LEFTOVER_AGE_S


def _sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Puts the checkpoint's name before whatever is wrong with it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: {error}") from error
    except (OSError, SafetensorError, CommunicationError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error})") from error
