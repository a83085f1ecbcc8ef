"""How far a run is: one clean bar on a terminal, a line now and then elsewhere."""

import logging
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from allstep.comm import Communicator

__all__ = ["Progress"]

_LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class _Status:
    """What is shown."""

    num_steps: int
    epoch: int
    loss: float
    samples_per_s: float


class Progress:
    """Shows how far training is, on rank 0 and on stderr; a context manager.

    On a terminal a bar; elsewhere a line whenever an epoch or ten seconds have passed.

    Args:
        num_total_steps: optimizer steps of the whole run; None if that is not known.
        comm: the workers.
        epochs: passes over the data of the whole run; None if that is not known.
    """

    def __init__(
        self, num_total_steps: int | None, comm: Communicator, *, epochs: int | None = None
    ) -> None:
        self._display: _Display = _Nothing()
        if comm.rank == 0:
            workers = f"{comm.size} worker{'s' if comm.size > 1 else ''}"
            kind = _Bar if sys.stderr.isatty() else _Lines
            self._display = kind(sys.stderr, num_total_steps, epochs, workers)

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._display.stop()

    def advance(self, num_steps: int) -> None:
        """Moves the bar.

        Args:
            num_steps: optimizer steps done since the run's start.
        """
        self._display.advance(num_steps)

    def update(self, num_steps: int, epoch: int, loss: float, samples_per_s: float) -> None:
        """Moves the bar and shows new numbers.

        Args:
            num_steps: optimizer steps done since the run's start.
            epoch: whole passes over the data before this step.
            loss: mean training loss since the last update.
            samples_per_s: of all workers together.
        """
        self._display.update(_Status(num_steps, epoch, loss, samples_per_s))

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._display.note(text)


class _Display(Protocol):
    """One way to show it."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def advance(self, num_steps: int) -> None: ...

    def update(self, status: _Status) -> None: ...

    def note(self, text: str) -> None: ...


class _Nothing:
    """What ranks other than 0 show."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def advance(self, num_steps: int) -> None:
        pass

    def update(self, status: _Status) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _Bar:
    """One line of a terminal that is drawn again and again; columns give way when it is narrow.

    Log lines, like notes, appear above it.
    """

    def __init__(
        self, stream: TextIO, num_total_steps: int | None, epochs: int | None, workers: str
    ) -> None:
        self._stream = stream
        self._epochs = epochs
        self._has_moved = False
        self._log_handlers = [
            handler
            for handler in logging.getLogger("allstep").handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream
        ]
        total = f"/{num_total_steps:,}" if num_total_steps is not None else ""
        self._progress = RichProgress(
            _column("{task.fields[epoch]}"),
            _column("step {task.completed:,}" + total),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            _column("{task.fields[numbers]}"),
            _column(workers),
            TimeRemainingColumn(compact=True),
            console=Console(file=stream, highlight=False),
            expand=True,
        )
        self._task = self._progress.add_task("", total=num_total_steps, epoch="", numbers="")

    def start(self) -> None:
        self._progress.start()
        for handler in self._log_handlers:  # rich has put a stream of its own there
            handler.setStream(sys.stderr)

    def stop(self) -> None:
        self._progress.stop()
        for handler in self._log_handlers:
            handler.setStream(self._stream)

    def advance(self, num_steps: int) -> None:
        if self._has_moved:
            self._progress.update(self._task, completed=num_steps)
        else:  # steps done before a resumption say nothing about the time that the rest takes
            self._progress.reset(self._task, completed=num_steps)
            self._has_moved = True

    def update(self, status: _Status) -> None:
        self.advance(status.num_steps)
        epoch = _epoch(status, self._epochs)
        self._progress.update(self._task, epoch=epoch, numbers=_numbers(status))

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False)


class _Lines:
    """Plain lines, for files and pipes."""

    def __init__(
        self, stream: TextIO, num_total_steps: int | None, epochs: int | None, workers: str
    ) -> None:
        self._stream = stream
        self._total = f"/{num_total_steps:,}" if num_total_steps is not None else ""
        self._epochs = epochs
        self._workers = workers
        self._printed: _Status | None = None
        self._printed_s = 0.0
        self._latest: _Status | None = None

    def start(self) -> None:
        pass

    def stop(self) -> None:
        if self._latest is not None and self._latest != self._printed:
            self._print(self._latest)

    def advance(self, num_steps: int) -> None:
        pass

    def update(self, status: _Status) -> None:
        self._latest = status
        is_new_epoch = self._printed is None or self._printed.epoch != status.epoch
        if is_new_epoch or time.monotonic() - self._printed_s >= _LINE_EVERY_S:
            self._print(status)

    def note(self, text: str) -> None:
        # In one piece: another thread may end the process, and flush half a line.
        print(f"{text}\n", end="", file=self._stream, flush=True)

    def _print(self, status: _Status) -> None:
        epoch = _epoch(status, self._epochs)
        step = f"step {status.num_steps:,}{self._total}"
        self.note(f"{epoch}  {step}  {_numbers(status)}  {self._workers}")
        self._printed = status
        self._printed_s = time.monotonic()


def _column(text: str) -> TextColumn:
    column = Column(no_wrap=True, overflow="ellipsis")
    return TextColumn(text, markup=False, table_column=column)


def _epoch(status: _Status, epochs: int | None) -> str:
    return f"epoch {status.epoch + 1}" + (f"/{epochs}" if epochs is not None else "")


def _numbers(status: _Status) -> str:
    return f"loss {status.loss:.4f}  {status.samples_per_s:,.0f} samples/s"
