"""The files with a checkpoint's tensors, and which workers write them.

[Note: writers of parts] If all workers see the folder that rank 0 has made, each writes files of
its own parts in it, in rounds of one file each, after which it sends the files' checksums to rank
0; only rank 0 waits for others. Rank 0 also writes everything that is not divided. If a worker does
not see the folder, or there are hundreds of workers, rank 0 receives all pieces and writes them.
[Note: divided checkpoints]
"""

import hashlib
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from allstep.comm import Communicator
from allstep.nn import DividedTensor
from allstep.train.disk import Disk
from allstep.train.packing import divided_in
from allstep.train.pieces import Piece, pieces_of, send_pieces

FILE_BYTES = 64 << 20
FIRST = "tensors.safetensors"
_MAX_FILES = 256  # a reader has all of them open at once, up to twice as many if sizes divide badly
_NAME = re.compile(r"tensors(-rank-\d+)?(-\d+)?\.safetensors")

Digest = dict[str, Any]
Group = list[Piece]


def holds_tensors(name: str) -> bool:
    """Whether a file of this name holds tensors."""
    return bool(_NAME.fullmatch(name))


def digest_of(path: Path) -> Digest:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size_bytes": path.stat().st_size, "sha256": digest}


def grouped(pieces: Iterable[Piece], max_bytes: int) -> Iterator[Group]:
    """The groups of pieces that are stored in one file each; the first group may be empty."""
    group: Group = []
    num_bytes = 0
    for piece in pieces:
        if group and num_bytes + piece.num_bytes > max_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(piece)
        num_bytes += piece.num_bytes
    yield group


def load_group(group: Group) -> dict[str, Tensor]:
    """The tensors of a group's file, by name."""
    return {piece.name: piece.load() for piece in group}


def write_all(
    new_folder: Callable[[], Path],
    tensors: Mapping[str, Tensor | DividedTensor],
    file_bytes: int,
    disk: Disk,
    comm: Communicator | None = None,
) -> dict[str, Digest]:
    """Writes tensors on rank 0; the other workers of divided tensors call `write_parts`.

    Args:
        new_folder: makes the folder to write in.
        tensors: name -> tensor, as `pack` returns them.
        file_bytes: approximate size of a file; larger if there would be too many files.
        disk: the disk to write to.
        comm: the workers; None if nothing is divided.

    Returns:
        File name -> size and checksum.

    Raises:
        OSError, SafetensorError: if this worker or another could not write; no worker waits then.
    """
    all_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in tensors.values())
    group_bytes = max(file_bytes, all_bytes // _MAX_FILES)
    names = [name for name, x in tensors.items() if isinstance(x, DividedTensor)]
    if comm is None or comm.size == 1 or not names:
        groups = grouped(pieces_of(tensors, file_bytes), group_bytes)
        return dict(_written(new_folder(), groups, 0, disk))
    try:
        folder = new_folder()
        token = folder / f"token-{uuid.uuid4().hex}"
        disk.write(token, b"")
    except BaseException:
        comm.broadcast_object(None)
        raise
    comm.broadcast_object((folder.name, token.name, names, group_bytes))
    own = list(grouped(pieces_of(tensors, file_bytes, only_own=True), group_bytes))
    num_rounds = _num_rounds(comm, own)
    disk.remove(token)
    if num_rounds is not None:
        return _written_by_each(comm, folder, own, num_rounds, disk)
    groups = grouped(pieces_of(tensors, file_bytes), group_bytes)
    try:
        return dict(_written(folder, groups, 0, disk))
    except (OSError, SafetensorError):
        for piece in chain.from_iterable(groups):
            piece.load()  # takes part in what other workers send
        raise


def write_parts(comm: Communicator, folder: Path, state: Any, file_bytes: int, disk: Disk) -> None:
    """Writes this worker's parts while rank 0 calls `write_all`; errors are raised on rank 0.

    Args:
        comm: the workers.
        folder: the parent of the checkpoint's folder, by its name on this worker.
        state: a state with divided tensors at the same places as rank 0's.
        file_bytes: as in `write_all`.
        disk: the disk to write to.
    """
    divided = parts_in(state)
    offer = comm.broadcast_object() if divided else None
    if offer is None:
        return
    name, token, names, group_bytes = offer
    tensors = dict(zip(names, divided, strict=True))
    own = [g for g in grouped(pieces_of(tensors, file_bytes, only_own=True), group_bytes) if g]
    can_write = _can_write(folder / name, token, comm.rank, disk)
    num_rounds = _num_rounds(comm, own if can_write else None)
    if num_rounds is None:
        send_pieces(tensors, file_bytes)
    else:
        _written_by_each(comm, folder / name, own, num_rounds, disk)


def parts_in(state: Any) -> list[DividedTensor]:
    """The divided tensors of a state that are not empty."""
    return [x for x in divided_in(state).values() if math.prod(x.shape)]


def _can_write(folder: Path, token: str, rank: int, disk: Disk) -> bool:
    """Whether this is the folder in which rank 0 has made the token, and can be written."""
    probe = folder / f"probe-{rank}"
    try:
        if not (folder / token).exists():
            return False
        disk.write(probe, b"")
    except OSError:
        return False
    disk.remove(probe)
    return True


def _num_rounds(comm: Communicator, own: Sequence[Group] | None) -> int | None:
    """The largest number of files of a worker; None if one can't write. All workers call it."""
    counts = comm.all_gather_object(None if own is None else len(own))
    return None if None in counts or comm.size > _MAX_FILES else max(counts)


def _written_by_each(
    comm: Communicator, folder: Path, own: Sequence[Group], num_rounds: int, disk: Disk
) -> dict[str, Digest]:
    """Writes this worker's files; returns all workers' files with checksums, on rank 0. Collective.

    Rank 0 gets a message for each file, so that it may wait for a peer as long as all its files
    take, but no longer than the communicator's timeout for each of them.
    """
    files: dict[str, Digest] = {}
    error: Exception | None = None
    written = _written(folder, own, comm.rank, disk)
    for _ in range(num_rounds):
        report: object = None
        try:
            report = next(written, None)
        except Exception as found:  # it ends the iteration over what is written
            error, report = found, str(found) or type(found).__name__
        for rank, told in enumerate(comm.gather_object(report) or ()):
            if isinstance(told, str):
                error = error or OSError(f"rank {rank}: {told}")
            elif told is not None:
                files.update([told])
    is_told = comm.rank > 0 and isinstance(error, (OSError, SafetensorError))
    if error is not None and not is_told:
        raise error
    return files


def _written(
    folder: Path, groups: Iterable[Group], rank: int, disk: Disk
) -> Iterator[tuple[str, Digest]]:
    """Writes one file per group; returns each with its checksum once it is synced."""
    stem = f"tensors-rank-{rank}" if rank else "tensors"
    for number, group in enumerate(groups, start=1):
        path = folder / f"{stem}{f'-{number}' if number > 1 else ''}.safetensors"
        disk.write_tensors(path, load_group(group))
        digest = digest_of(path)
        disk.sync(path)
        yield path.name, digest
