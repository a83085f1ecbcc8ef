"""A run's numbers over time: JSON lines for programs, TensorBoard for eyes."""

import json
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.train.storage import writing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_logger = logging.getLogger(__name__)
_FILE = "metrics.jsonl"
_RESERVED = ("time", "non_finite")


class MetricsLog:
    """Appends to `run_dir/metrics.jsonl` and `run_dir/tensorboard`, on rank 0 only.

    A line is a JSON object with `step`, `epoch`, `time` (seconds since 1970) and the scalars.
    JSON has no nan nor infinity: such a scalar is null, and `non_finite` says what it was.

    Args:
        run_dir: the run's folder; made if missing.
        comm: its workers.
    """

    def __init__(self, run_dir: Path | str, comm: Communicator) -> None:
        self._run_dir = Path(run_dir)
        self._is_writer = comm.rank == 0
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None

    def write(self, step: int, epoch: int, **scalars: float | Tensor) -> None:
        """Appends one record.

        Args:
            step: optimizer steps done.
            epoch: passes over the data done.
            scalars: numbers or one-element tensors by name.

        Raises:
            UsageError: if a name is one of the record's own.
            CheckpointError: if the disk is full or can't be written.
        """
        if not self._is_writer:
            return
        for name in _RESERVED:
            if name in scalars:
                raise UsageError(f"`{name}` is one of the record's own names; choose another.")
        values = {name: _plain(value) for name, value in scalars.items()}
        self._append({"step": step, "epoch": epoch, "time": time.time()} | _as_json(values))
        with writing(self._run_dir / "tensorboard"):
            if self._board is None:
                self._board = _open_board(self._run_dir, step)
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes both files; what a full disk did not take is lost, and a warning says so."""
        for file in (self._file, self._board):
            try:
                if file is not None:
                    file.close()
            except OSError as error:
                _logger.warning("%s: the end of the log is lost (%s)", self._run_dir, error)
        self._file = self._board = None

    def _append(self, record: dict[str, Any]) -> None:
        path = self._run_dir / _FILE
        with writing(path):
            if self._file is None:
                self._file = _open_for_append(path)
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """Reads a run's records, one a step, in the order of steps.

    Lines of the same step are merged; a later line wins, for after a resumption steps repeat.
    A line that was torn by a kill is left out.

    Args:
        path: a `metrics.jsonl` or the run's folder.

    Raises:
        UsageError: if there is no such file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / _FILE
    if not path.is_file():
        raise UsageError(f"`path` (={path}) does not exist; give a run's folder.")
    records: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _parsed(line)
        if record is not None:
            records.setdefault(int(record["step"]), {}).update(record)
    return [records[step] for step in sorted(records)]


def _parsed(line: str) -> dict[str, float] | None:
    """A line's record with its nan and infinities; None for a torn line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(record, dict) or "step" not in record:
        return None
    words = record.pop("non_finite", {})
    return record | {name: float(word) for name, word in words.items()}


def _plain(value: float | Tensor) -> float:
    number = value.item() if isinstance(value, Tensor) else value
    return number if type(number) in (bool, int) else float(number)


def _as_json(values: dict[str, float]) -> dict[str, Any]:
    words = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    finite = {name: None if name in words else value for name, value in values.items()}
    return finite | ({"non_finite": words} if words else {})


def _open_for_append(path: Path) -> TextIO:
    """The file, at the start of a line even if the last one was torn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8")


def _open_board(run_dir: Path, first_step: int) -> "SummaryWriter":
    """TensorBoard's writer; what a killed run wrote from `first_step` on is not shown."""
    from torch.utils.tensorboard import SummaryWriter  # a second to import, on rank 0 only

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step, flush_secs=10)
