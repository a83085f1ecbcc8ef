"""One checkpoint on disk: written atomically, read with checksums.

[Note: atomic checkpoint] A checkpoint is a folder with `tensors.safetensors` (if the state is large
also `tensors-2.safetensors` and so on, and `tensors-rank-1.safetensors` of other workers),
`state.msgpack` (everything else) and `manifest.json`, which has their checksums and its own. It is
written under another name, `.tmp-NAME-HOST-PID`, each file is synced, and the folder is renamed
when it is complete; so a folder with the right name is complete unless the disk damaged it, which
the checksums detect. An existing folder of that name is renamed `.old-NAME` first; it is restored
if the writer dies before the new one is in place, and deleted once the new name is synced, too.
What dead writers leave behind is removed later.
"""

import contextlib
import datetime
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from allstep import __version__
from allstep.comm import Communicator
from allstep.errors import CheckpointError, UsageError
from allstep.train.disk import LOCAL_DISK, Disk
from allstep.train.packing import pack
from allstep.train.pieces import Selection, pieces_of
from allstep.train.tensor_files import (
    FILE_BYTES,
    FIRST,
    Digest,
    digest_of,
    grouped,
    holds_tensors,
    load_group,
    parts_in,
    write_all,
)

_FORMAT = 1
_STATE, _MANIFEST = "state.msgpack", "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 20
_MAX_REASON = 300  # characters
_TEMPORARY = re.compile(r"\.tmp-(?P<name>.+)-(?P<host>[^-]+)-(?P<pid>\d+)")
_ASIDE = ".old-"
_FOREIGN_REST_S = 3600.0  # another host's processes cannot be asked whether they live


@dataclass(frozen=True)
class Stored:
    """A checkpoint's parts.

    Attributes:
        step: number of optimizer steps made.
        data: the encoded state.
        index: each group's tensors, as they are stored, on the "meta" device.
        load: group number -> the group's tensors.
    """

    step: int
    data: bytes
    index: Sequence[dict[str, Tensor]]
    load: Callable[[int], dict[str, Tensor]]

    def unpack(self) -> Any:
        """The state."""
        selection = self.select()
        for group in range(len(self.index)):
            for name, tensor in self.load(group).items():
                selection.take(name, tensor, copy=False)
        return selection.state()

    def select(self, select: Callable[[Any], Any] | None = None) -> Selection:
        """The parts of the state that `select` chooses; see `Selection`."""
        return Selection(self.data, self.index, select)


def write_checkpoint(
    path: Path | str,
    state: Any,
    *,
    step: int = 0,
    file_bytes: int = FILE_BYTES,
    disk: Disk = LOCAL_DISK,
    comm: Communicator | None = None,
) -> None:
    """Writes a state as the folder `path`, replacing what is there; see [Note: atomic checkpoint].

    Args:
        path: the folder to make.
        state: nested dicts, lists, tuples and sets of None, numbers, texts, bytes, numpy arrays
            and dense tensors; no tensors in sets or as keys. If there are divided tensors, their
            other workers call `write_parts`.
        step: number of optimizer steps made.
        file_bytes: approximate size of a file, and of other workers' tensors in memory at once.
        disk: the disk to write to.
        comm: the workers of divided tensors.

    Raises:
        UsageError: if `state` holds anything else; the message names its path.
        CheckpointError: if the disk is full or can't be written; then the folder holds either the
            previous checkpoint or the complete new one.
    """
    path = Path(path)
    try:
        data, tensors = pack(state)
    except UsageError:
        if comm is not None and parts_in(state):
            comm.broadcast_object(None)  # in place of the folder
        raise
    temporary = _temporary(path, disk)

    def new_folder() -> Path:
        _make_folders(temporary.parent, disk)
        disk.remove(temporary)
        disk.make_folder(temporary)
        disk.write(temporary / _STATE, data)
        return temporary

    try:
        files = write_all(new_folder, tensors, file_bytes, disk, comm)
        _write_manifest_of(temporary, step, files, disk)
        _put_in_place(temporary, path, disk)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}). Free some space or choose another folder; "
            "older checkpoints are untouched."
        ) from error
    finally:
        disk.remove(temporary)  # it is no more if all went well


def read_checkpoint(path: Path | str) -> Any:
    """Reads and checks the state that `write_checkpoint` wrote; tensors are whole, on the CPU.

    Raises:
        CheckpointError: if a file is missing or does not match its checksum.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "step-00000003"
    >>> write_checkpoint(folder, {"weight": torch.ones(2), "rates": (0.1, None)})
    >>> read_checkpoint(folder)
    {'weight': tensor([1., 1.]), 'rates': (0.1, None)}
    """
    with open_stored(path) as stored:
        return stored.unpack()


@contextmanager
def open_stored(path: Path | str) -> Iterator[Stored]:
    """A checkpoint's checked parts, which stay readable even if it is deleted meanwhile.

    Raises:
        CheckpointError: as in `read_checkpoint`.
    """
    path = Path(path)
    manifest = verify(path)
    with ExitStack() as opened:
        with _damage_named(path):
            names = filter(holds_tensors, manifest["files"])
            files = [opened.enter_context((path / name).open("rb")) for name in names]

            def load(group: int) -> dict[str, Tensor]:
                return safetensors.torch.load_file(f"/proc/self/fd/{files[group].fileno()}")

            index = [_on_meta(load(group)) for group in range(len(files))]
            stored = Stored(manifest["step"], (path / _STATE).read_bytes(), index, load)
            if _read_manifest(path) != manifest:
                raise CheckpointError("was replaced while it was read")
            stored.select()  # checksums prove that nothing changed, not that the writer was right
        yield stored


def in_memory(state: Any) -> Stored:
    """A state without divided tensors, in the form of a stored one."""
    data, tensors = pack(state)
    groups = list(map(load_group, grouped(pieces_of(tensors, FILE_BYTES), FILE_BYTES)))
    return Stored(0, data, list(map(_on_meta, groups)), groups.__getitem__)


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
        for name in (FIRST, _STATE):
            if name not in manifest["files"]:
                raise CheckpointError(f"{_MANIFEST} does not list {name}")
        for name, expected in manifest["files"].items():
            if name != _STATE and not holds_tensors(name):
                raise CheckpointError(f"{_MANIFEST} lists {name}")
            _check_file(path / name, expected)
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any], disk: Disk = LOCAL_DISK) -> None:
    """Writes `manifest.json` with a checksum of itself."""
    disk.write(folder / _MANIFEST, _sealed(manifest))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a full disk, and any other error of writing a file, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error}). Free some space, then resume the run."
        ) from error


def discard(path: Path, disk: Disk = LOCAL_DISK) -> None:
    """Deletes a checkpoint; if interrupted, no partial checkpoint is left under its name."""
    temporary = _temporary(path, disk)
    disk.remove(temporary)
    disk.rename(path, temporary)
    disk.remove(temporary)


class Sweeper:
    """Removes what dead writers left behind, and restores what they had moved aside.

    Leftovers of another host are removed once this object has found them unchanged for an hour: the
    files' times are set by that host's or the file server's clock, which may be wrong, or be set
    while somebody writes.

    Args:
        folder: the folder of checkpoints.
        disk: the disk to remove from, with a clock.
    """

    def __init__(self, folder: Path, disk: Disk = LOCAL_DISK) -> None:
        self._folder, self._disk = folder, disk
        self._found: dict[Path, tuple[object, float]] = {}  # how it looks, and since when

    def sweep(self) -> None:
        """Sweeps. The caller must not be writing in the folder at the same time; others may."""
        folder, disk = self._folder, self._disk
        left_over = [path for path in sorted(folder.glob(".tmp-*")) if self._is_left_over(path)]
        with contextlib.suppress(OSError):  # a full disk
            if left_over:
                disk.sync(folder)  # what has had these names is not to have them again
            for path in left_over:
                disk.remove(path)
        for aside in sorted(folder.glob(f"{_ASIDE}*")):
            path = folder / aside.name.removeprefix(_ASIDE)
            with contextlib.suppress(OSError):  # a living writer was quicker
                if path.exists():
                    _settle(path, aside, disk)
                else:
                    disk.rename(aside, path)

    def _is_left_over(self, path: Path) -> bool:
        """Whether the writer of a temporary folder has died."""
        disk, match = self._disk, _TEMPORARY.fullmatch(path.name)
        if match is None:
            return False
        if match["host"] == disk.host:
            pid = int(match["pid"])
            return pid == disk.pid or not disk.is_alive(pid)
        try:
            files = [(entry.name, entry.stat()) for entry in sorted(path.iterdir())]
        except OSError:  # its writer is busy with it
            return False
        look = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
        now_s = disk.now_s()
        before, since_s = self._found.get(path, (None, now_s))
        if look != before:
            self._found[path] = look, now_s
            return False
        return now_s - since_s > _FOREIGN_REST_S


def _on_meta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}


def _write_manifest_of(folder: Path, step: int, files: dict[str, Digest], disk: Disk) -> None:
    """Completes a folder whose tensors are written."""
    manifest = {
        "format": _FORMAT,
        "step": step,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "allstep": __version__,
        "torch": str(torch.__version__),
        "files": {_STATE: digest_of(folder / _STATE)} | files,
    }
    write_manifest(folder, manifest, disk)
    for path in (folder / _STATE, folder / _MANIFEST, folder):
        disk.sync(path)


def _read_manifest(folder: Path) -> dict[str, Any]:
    if _size_bytes(folder / _MANIFEST) > _MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{_MANIFEST} is too long")
    data = (folder / _MANIFEST).read_bytes()
    try:
        manifest: dict[str, Any] = json.loads(data)
        del manifest["sha256"]
        is_whole = _sealed(manifest) == data
    except (ValueError, TypeError, LookupError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CheckpointError(f"{_MANIFEST} does not match its checksum")
    if manifest["format"] != _FORMAT:
        raise CheckpointError(
            f"{_MANIFEST} is of format {manifest['format']}, this allstep reads format {_FORMAT}"
        )
    if type(manifest["step"]) is not int or manifest["step"] < 0:
        raise CheckpointError(f"{_MANIFEST} has {manifest['step']} for a step")
    return manifest


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The file's contents, with a checksum of the rest."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({"sha256": digest} | manifest, indent=1).encode() + b"\n"


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    size_bytes = _size_bytes(path)
    if size_bytes != expected["size_bytes"]:
        raise CheckpointError(
            f"{path.name} has {size_bytes:,} bytes instead of {expected['size_bytes']:,}"
        )
    if digest_of(path) != expected:
        raise CheckpointError(f"{path.name} does not match its checksum")


def _size_bytes(path: Path) -> int:
    """Size of a regular file; others are refused, as reading a pipe or a device may never end."""
    if not path.exists():
        raise CheckpointError(f"{path.name} is missing")
    if not path.is_file():
        raise CheckpointError(f"{path.name} is no file")
    return path.stat().st_size


def _make_folders(path: Path, disk: Disk) -> None:
    """Makes a folder and its missing parents; all of them survive a loss of power."""
    if not path.is_dir():
        _make_folders(path.parent, disk)
        with contextlib.suppress(FileExistsError):  # another worker was quicker
            disk.make_folder(path)
    with contextlib.suppress(PermissionError):  # where it is not this worker's to read
        disk.sync(path.parent)  # always: who made it may have died before


def _put_in_place(temporary: Path, path: Path, disk: Disk) -> None:
    aside = path.with_name(_ASIDE + path.name)
    while True:
        if os.path.lexists(path):
            if os.path.lexists(aside):
                _settle(path, aside, disk)
            disk.rename(path, aside)
        try:
            disk.rename(temporary, path)
            break
        except OSError:
            if not os.path.lexists(path):  # else a reader's sweep has put it back
                with contextlib.suppress(OSError):
                    disk.rename(aside, path)
                raise
    _settle(path, aside, disk)


def _settle(path: Path, aside: Path, disk: Disk) -> None:
    """Deletes the previous folder, moved aside, once the new folder's name is on the disk.

    Another writer may move `path` aside meanwhile; so it gets a name that only this writer uses.
    """
    replaced = _temporary(aside, disk)
    if os.path.lexists(aside):
        with contextlib.suppress(OSError):  # another was quicker, or the disk is full
            disk.rename(aside, replaced)
            if not os.path.lexists(path):
                disk.rename(replaced, path)
    disk.sync(path.parent)
    if os.path.lexists(path):
        disk.remove(replaced)


def _temporary(path: Path, disk: Disk) -> Path:
    return path.with_name(f".tmp-{path.name}-{disk.host}-{disk.pid}")


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Adds the checkpoint's name to the message of an error."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: {error}") from error
    except Exception as error:  # whatever is in the files, an older checkpoint may be whole
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON]
        raise CheckpointError(f"{path.name}: cannot be read ({reason})") from error
