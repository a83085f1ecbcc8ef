"""What a checkpoint's folder must hold, sealed against any flipped bit."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allstep.errors import CheckpointError

__all__ = ["FileDigest", "Manifest"]

_FORMAT = 1
_NAME = "manifest.json"
_HEAD = '{"sha256": "%s", "manifest": '
_HEAD_LENGTH = len(_HEAD % ("0" * 64))
_TAIL = "}\n"


@dataclass(frozen=True)
class FileDigest:
    """Size and checksum of one file."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileDigest":
        """Reads the whole file."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The step and the state's skeleton, and what is needed to check and to understand them.

    Attributes:
        step: optimizer steps done.
        date: when it was written, ISO 8601 in UTC.
        allstep, torch: versions that wrote it.
        files: the other files of the folder.
        state: the state without its tensors; see [Note: skeleton].
        format: version of this layout.
    """

    step: int
    date: str
    allstep: str
    torch: str
    files: dict[str, FileDigest]
    state: Any
    format: int = _FORMAT

    def write(self, folder: Path) -> Path:
        """Writes `manifest.json`; returns its path."""
        path = folder / _NAME
        path.write_text(_sealed(json.dumps(asdict(self), allow_nan=False)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads `manifest.json` and checks its own seal.

        Raises:
            CheckpointError: if it is missing, damaged, or of a newer format.
        """
        try:
            data = (folder / _NAME).read_bytes()
        except FileNotFoundError as error:
            raise CheckpointError(f"{_NAME} is missing") from error
        text = data.decode("utf-8", "replace")
        body = text[_HEAD_LENGTH : -len(_TAIL)]
        if _sealed(body).encode() != data:
            raise CheckpointError(f"{_NAME} does not match its checksum")
        fields = json.loads(body)
        if fields["format"] != _FORMAT:
            raise CheckpointError(
                f"{_NAME} is of format {fields['format']}, this allstep reads format {_FORMAT}"
            )
        files = {name: FileDigest(**digest) for name, digest in fields.pop("files").items()}
        return cls(files=files, **fields)

    def verify(self, folder: Path) -> None:
        """Checks size and checksum of every file.

        Raises:
            CheckpointError: if one is missing or differs.
        """
        for name, expected in self.files.items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{name} is missing")
            size_bytes = path.stat().st_size
            if size_bytes != expected.size_bytes:
                raise CheckpointError(
                    f"{name} has {size_bytes:,} bytes instead of {expected.size_bytes:,}"
                )
            if FileDigest.of(path) != expected:
                raise CheckpointError(f"{name} does not match its checksum")


def _sealed(body: str) -> str:
    """The file's text: the checksum of the body's bytes, then the body."""
    return _HEAD % hashlib.sha256(body.encode()).hexdigest() + body + _TAIL
