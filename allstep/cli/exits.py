"""How a launcher's workers ended, kept in the run's folder."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from allstep.comm import state_folder


@dataclass(frozen=True)
class Exits:
    """How a launcher's workers ended.

    Attributes:
        codes: exit codes by rank, negative if a signal ended it.
        first: the rank that failed on its own account.
        killed: ranks that the launcher killed, for they had not ended long after others failed.
    """

    codes: Sequence[int | None]
    first: int
    killed: Sequence[int]


def read_exits(run_dir: Path) -> Exits | None:
    """What a run's launcher has left; None if there was none, or all ended well."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Exits(**json.loads(_file(run_dir).read_text(encoding="utf-8")))
    return None


def write_exits(run_dir: Path, exits: Exits) -> None:
    """Leaves it for `allstep why`; on a full disk nothing."""
    with contextlib.suppress(OSError):
        _file(run_dir).parent.mkdir(parents=True, exist_ok=True)
        _file(run_dir).write_text(json.dumps(asdict(exits)), encoding="utf-8")


def forget_exits(run_dir: Path | None) -> None:
    """Deletes what the launcher of an earlier part of a run has left."""
    if run_dir is not None:
        with contextlib.suppress(OSError):
            _file(run_dir).unlink(missing_ok=True)


def _file(run_dir: Path) -> Path:
    return state_folder(run_dir) / "launcher.json"
