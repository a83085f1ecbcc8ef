"""One checkpoint on disk: written so that it is there whole or not at all, read with checks.

[Note: atomic checkpoint] A checkpoint is a folder with `tensors.safetensors` and `manifest.json`.
It is written under another name, `.tmp-NAME-HOST-PID`, each file is synced, and the folder is
renamed when it is complete; so a folder with the right name is whole unless the disk damaged it,
which the checksums tell. One that stands in the way is renamed `.old-NAME` first and comes back
if the writer dies before the new one is in place. What dead writers leave is swept away later.
"""

import contextlib
import datetime
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from allstep import __version__
from allstep.errors import CheckpointError
from allstep.train.manifest import FileDigest, Manifest
from allstep.train.state_tree import flatten, tensor_names, unflatten

__all__ = ["discard", "read_checkpoint", "read_parts", "sweep", "verify", "write_checkpoint"]

_TENSORS = "tensors.safetensors"
_TEMPORARY = re.compile(r"\.tmp-(?P<name>.+)-(?P<host>[^-]+)-(?P<pid>\d+)")
_ASIDE = ".old-"
_FOREIGN_LEFTOVER_AGE_S = 3600.0  # another host's processes cannot be asked whether they live


def write_checkpoint(path: Path | str, state: Any, *, step: int = 0) -> None:
    """Writes a state as the folder `path`, replacing what is there; see [Note: atomic checkpoint].

    Args:
        path: the folder to make.
        state: nested dicts (keys of str or int), lists and tuples of None, bool, int, float, str,
            bytes and tensors.
        step: optimizer steps done.

    Raises:
        UsageError: if `state` holds anything else.
        CheckpointError: if the disk is full or can't be written; nothing has changed then.
    """
    path = Path(path)
    skeleton, tensors = flatten(state)
    temporary = _temporary(path)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write_files(temporary, skeleton, tensors, step)
        _put_in_place(temporary, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{path} could not be written ({error}). Free some space or choose another folder; "
            "older checkpoints are untouched."
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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
    manifest, tensors = read_parts(path)
    return unflatten(manifest.state, tensors)


def read_parts(path: Path | str) -> tuple[Manifest, dict[str, Tensor]]:
    """The checked manifest and tensors; see `read_checkpoint`."""
    path = Path(path)
    manifest = verify(path)
    with _damage_named(path):
        tensors = load_file(path / _TENSORS)
        missing = tensor_names(manifest.state) - tensors.keys()
        if missing:
            raise CheckpointError(f"{_TENSORS} lacks {', '.join(sorted(missing)[:5])}")
    return manifest, tensors


def verify(path: Path | str) -> Manifest:
    """Checks every file of a checkpoint against its checksum.

    Raises:
        CheckpointError: naming the checkpoint, the file and what is wrong with it.
    """
    path = Path(path)
    with _damage_named(path):
        manifest = Manifest.read(path)
        if _TENSORS not in manifest.files:
            raise CheckpointError(f"manifest.json does not list {_TENSORS}")
        manifest.verify(path)
    return manifest


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


def _write_files(folder: Path, skeleton: Any, tensors: dict[str, Tensor], step: int) -> None:
    save_file(tensors, folder / _TENSORS)
    _sync(folder / _TENSORS)
    manifest = Manifest(
        step=step,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        allstep=__version__,
        torch=str(torch.__version__),
        files={_TENSORS: FileDigest.of(folder / _TENSORS)},
        state=skeleton,
    )
    _sync(manifest.write(folder))
    _sync(folder)


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
        return pid == os.getpid() or not _is_alive(pid)
    try:
        newest_s = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:  # its writer is busy with it
        return False
    return time.time() - newest_s > _FOREIGN_LEFTOVER_AGE_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error})") from error
