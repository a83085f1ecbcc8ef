"""A run's metrics over time, as JSON lines, CSV, TensorBoard files, and calls of loggers."""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from torch import Tensor

from allstep.comm import Communicator
from allstep.errors import UsageError
from allstep.files import write_table
from allstep.train.storage import writing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_logger = logging.getLogger(__name__)
_FILE, _TABLE = "metrics.jsonl", "metrics.csv"
_RESERVED = ("time", "non_finite")
_COMPARED_BYTES = 1 << 16  # of the log's end, searched for the last records


class Logger(Protocol):
    """A function that logs scalars, such as `wandb.log` or `mlflow.log_metrics`."""

    def __call__(self, scalars: dict[str, float], /, *, step: int) -> object: ...


class MetricsLog:
    """Appends to `run_dir/metrics.jsonl` and `run_dir/tensorboard`, on rank 0 only.

    A line is a JSON object with `step`, `epoch`, `time` (seconds since 1970) and the scalars.
    JSON has neither NaN nor infinity: such a scalar is null, and `non_finite` says what it was.
    When the log is closed, `run_dir/metrics.csv` gets a row for each step.

    Loggers get each record's scalars and `epoch`. A logger that raises does not end the training:
    its first exception becomes a warning, later ones are ignored, and it still gets all records.

    Args:
        run_dir: the run's folder; made if missing.
        comm: its workers.
        loggers: called on rank 0 only.
        keeps_last: whether every worker keeps the last records, in case rank 0 dies before it has
            written them.

    Attributes:
        last: the last two records, a step's and an evaluation's, if they are kept.

    Raises:
        UsageError: if a logger is not callable.
    """

    def __init__(
        self,
        run_dir: Path | str,
        comm: Communicator,
        *,
        loggers: Sequence[Logger] = (),
        keeps_last: bool = False,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._is_writer = comm.rank == 0
        _check_loggers(loggers)
        self._loggers, self._failed = list(loggers), set[int]()
        self._last_step = 0
        self._keeps_last = keeps_last
        self.last: list[dict[str, Any]] = []
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None

    def write(self, step: int, epoch: int, **scalars: float | Tensor) -> None:
        """Appends one record.

        Args:
            step: number of optimizer steps made.
            epoch: number of passes over the data made.
            scalars: name -> number or one-element tensor.

        Raises:
            UsageError: if a name is a reserved name of the record.
            CheckpointError: if the disk is full or can't be written.
        """
        for name in _RESERVED:
            if name in scalars:
                raise UsageError(f"`{name}` is one of the record's own names; choose another.")
        if not (self._is_writer or self._keeps_last):
            return
        values = {name: _plain(value) for name, value in scalars.items()}
        record = {"step": step, "epoch": epoch, "time": time.time()} | _as_json(values)
        if self._keeps_last:
            if _kind(record) in map(_kind, self.last):  # of an evaluation that was begun again
                return
            self.last = [*self.last[-1:], record]
        if self._is_writer:
            self._put(record)

    def _put(self, record: dict[str, Any]) -> None:
        """Writes a record to the files and passes it to the loggers."""
        self._append(record)
        self._last_step = step = record["step"]
        values = _values(record)
        with writing(self._run_dir / "tensorboard"):
            if self._board is None:
                self._board = _open_board(self._run_dir, step)
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        for index, logger in enumerate(self._loggers):
            try:
                logger({"epoch": record["epoch"], **values}, step=step)
            except Exception as error:
                if index not in self._failed:
                    _warn_of(logger, index, step, error)
                self._failed.add(index)

    def complete(self, last: Sequence[dict[str, Any]]) -> None:
        """Appends those of the last records that the previous writer has not written.

        Args:
            last: the attribute `last` of a log in the same folder.
        """
        self.last = list(last)
        path = self._run_dir / _FILE
        if not (self._is_writer and last):
            return
        read = _records(path, _COMPARED_BYTES) if path.is_file() else []
        written = {_kind(record) for record in read[-2 * len(last) :]}
        self._last_step = last[-1]["step"]
        for record in last:
            if _kind(record) not in written:
                self._put(record)

    def close(self) -> None:
        """Closes the files; records that a full disk did not take are lost, with a warning."""
        closing = [file.close for file in (self._file, self._board) if file is not None]
        if self._is_writer and self._last_step:
            closing.append(lambda: _write_table(self._run_dir, self._last_step))
        for close in closing:
            try:
                close()
            except (OSError, UsageError) as error:  # someone may have deleted them
                _logger.warning("%s: the end of the log is lost (%s)", self._run_dir, error)
        self._file = self._board = None

    def _append(self, record: dict[str, Any]) -> None:
        path = self._run_dir / _FILE
        with writing(path):
            if self._file is None:
                self._file = _open_for_append(path)
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()


def read_metrics(path: Path | str, *, last_bytes: int | None = None) -> list[dict[str, float]]:
    """Reads a run's records, one per step, in the order of steps.

    Lines of the same step are merged; a later line wins, as steps repeat after a resumption. An
    incomplete line, left by a killed process, is ignored.

    Args:
        path: a `metrics.jsonl` or the run's folder.
        last_bytes: read only this many bytes at the end; None to read the whole file.

    Raises:
        UsageError: if there is no such file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / _FILE
    if not path.is_file():
        raise UsageError(f"`path` (={path}) does not exist; give a run's folder.")
    records: dict[int, dict[str, float]] = {}
    for record in _records(path, last_bytes):
        records.setdefault(int(record["step"]), {}).update(record)
    return [records[step] for step in sorted(records)]


def _write_table(run_dir: Path, last_step: int) -> None:
    """Writes `metrics.csv` atomically, with a row for each step; missing values are empty cells.

    Records of later steps than the last were undone when the run went back to a checkpoint.
    """
    records = [record for record in read_metrics(run_dir) if record["step"] <= last_step]
    columns = list(dict.fromkeys(name for record in records for name in record))
    write_table(run_dir / _TABLE, columns, records)


def _check_loggers(loggers: Sequence[Logger]) -> None:
    if callable(loggers):
        name = getattr(loggers, "__name__", "logger")
        raise UsageError(f"`loggers` (={loggers}) must be a list: [{name}].")
    for index, logger in enumerate(loggers):
        if not callable(logger):
            raise UsageError(
                f"`loggers[{index}]` (={logger!r}) can't be called as logger(scalars, step=step):"
                " give a function as `wandb.log`, or an object's method, as `log_metrics` of one"
                " of Lightning's loggers."
            )


def _warn_of(logger: Logger, index: int, step: int, error: Exception) -> None:
    _logger.warning(
        "`loggers[%d]` (%s) failed at step %d (%s: %s): training goes on, metrics.jsonl has all;"
        " what else fails in it is passed over",
        index,
        getattr(logger, "__qualname__", type(logger).__name__),
        step,
        type(error).__name__,
        error,
    )


def _records(path: Path, last_bytes: int | None) -> list[dict[str, float]]:
    """The file's records, in order; only those in the last bytes if a number is given."""
    with path.open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, path.stat().st_size - last_bytes))
        text = file.read().decode("utf-8", errors="replace")
    parsed = map(_parsed, text.splitlines())
    return [record for record in parsed if record is not None]


def _parsed(line: str) -> dict[str, float] | None:
    """A line's record with its NaN and infinities; None if the line is incomplete or damaged."""
    try:
        record = json.loads(line)
        words = record.pop("non_finite", {})
        record |= {name: float(word) for name, word in words.items()}
    except (ValueError, TypeError, AttributeError):
        return None
    are_numbers = all(isinstance(value, (int, float)) for value in record.values())
    return record if are_numbers and type(record.get("step")) is int else None


def _kind(record: Mapping[str, Any]) -> tuple[int, frozenset[str]]:
    """What identifies a record: its step, and the names of its scalars."""
    return record["step"], frozenset(record) - {"non_finite"}


def _plain(value: float | Tensor) -> float:
    number = value.item() if isinstance(value, Tensor) else value
    return number if type(number) in (bool, int) else float(number)


def _as_json(values: dict[str, float]) -> dict[str, Any]:
    words = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    finite = {name: None if name in words else value for name, value in values.items()}
    return finite | ({"non_finite": words} if words else {})


def _values(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's scalars, without its reserved names; the inverse of `_as_json`."""
    words = record.get("non_finite", {})
    given = {name: v for name, v in record.items() if name not in ("step", "epoch", *_RESERVED)}
    return given | {name: float(word) for name, word in words.items()}


def _open_for_append(path: Path) -> TextIO:
    """Opens the file at the start of a line, even if the last one is incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8")


def _open_board(run_dir: Path, first_step: int) -> "SummaryWriter":
    """TensorBoard's writer; records of a killed run from `first_step` on are hidden."""
    from torch.utils.tensorboard import SummaryWriter  # a second to import, on rank 0 only

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step, flush_secs=10)
