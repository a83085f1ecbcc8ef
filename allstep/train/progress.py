"""Shows a run's progress: a bar on a terminal, occasional lines elsewhere."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from allstep.comm import Communicator

_LINE_EVERY_S = 10.0
_MOST_SHARES = 8  # as many as a line has room for


class Progress:
    """Shows a training's progress, on rank 0 and on stderr; a context manager.

    It is a bar on a terminal; elsewhere a line whenever an epoch or ten seconds have passed.

    Args:
        num_total_steps: optimizer steps of the whole run; None if unknown.
        comm: the workers.
        epochs: passes over the data in the whole run; None if unknown.
        unit: the word for a step.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        num_total_steps: int | None,
        comm: Communicator,
        *,
        epochs: int | None = None,
        unit: str = "step",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epochs = epochs
        self._display = _Display()
        if comm.rank == 0:
            workers = f"{comm.size} worker{'s' if comm.size > 1 else ''}"
            if sys.stderr.isatty():
                self._display = _Bar(sys.stderr, unit, num_total_steps, workers)
            else:
                self._display = _Lines(sys.stderr, unit, num_total_steps, workers, clock)

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.stop()

    def advance(self, num_steps: int) -> None:
        """Moves the bar.

        Args:
            num_steps: steps made since the run's start.
        """
        self._display.advance(num_steps)

    def update(
        self,
        num_steps: int,
        epoch: int,
        loss: float,
        samples_per_s: float,
        noise_scale: float | None = None,
        *,
        micro_batches: Sequence[float] = (),
    ) -> None:
        """Moves the bar and shows new numbers.

        Args:
            num_steps: optimizer steps made since the run's start.
            epoch: whole passes over the data before this step.
            loss: mean training loss since the last update.
            samples_per_s: samples per second of all workers together.
            noise_scale: the gradient noise scale, if it is measured.
            micro_batches: each worker's number of micro-batches in a global batch, if not equal.
        """
        shown_epoch = f"epoch {epoch + 1}" + (f"/{self._epochs}" if self._epochs else "")
        numbers = f"loss {loss:.4f}  {samples_per_s:,.0f} samples/s"
        if noise_scale is not None:
            numbers += f"  noise scale {noise_scale:,.0f}"
        if 1 < len(micro_batches) <= _MOST_SHARES:
            numbers += "  micro-batches " + "+".join(f"{n:.0f}" for n in micro_batches)
        self._display.update(num_steps, shown_epoch, numbers)

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._display.note(text)


class _Display:
    """A way to show progress; this one shows nothing, for ranks other than 0."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def advance(self, num_steps: int) -> None:
        pass

    def update(self, num_steps: int, epoch: str, numbers: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _Bar(_Display):
    """A line of a terminal that is redrawn; columns are left out if the terminal is narrow.

    Log lines and notes appear above it.
    """

    def __init__(
        self, stream: TextIO, unit: str, num_total_steps: int | None, workers: str
    ) -> None:
        self._stream = stream
        self._has_moved = False
        self._log_handlers = [
            handler
            for handler in logging.getLogger("allstep").handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream
        ]
        total = f"/{num_total_steps:,}" if num_total_steps is not None else ""
        self._progress = RichProgress(
            _column("{task.fields[epoch]}"),
            _column(unit + " {task.completed:,}" + total),
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
        else:  # the steps before a resumption don't tell how long the remaining ones take
            self._progress.reset(self._task, completed=num_steps)
            self._has_moved = True

    def update(self, num_steps: int, epoch: str, numbers: str) -> None:
        self.advance(num_steps)
        self._progress.update(self._task, epoch=epoch, numbers=numbers)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False)


class _Lines(_Display):
    """Plain lines, for files and pipes."""

    def __init__(
        self,
        stream: TextIO,
        unit: str,
        num_total_steps: int | None,
        workers: str,
        clock: Callable[[], float],
    ) -> None:
        self._stream = stream
        self._unit = unit
        self._total = f"/{num_total_steps:,}" if num_total_steps is not None else ""
        self._workers = workers
        self._clock = clock
        self._num_steps = 0
        self._epoch = self._numbers = self._printed_epoch = ""
        self._is_news = False
        self._printed_s = clock()

    def stop(self) -> None:
        if self._is_news:
            self._print()

    def advance(self, num_steps: int) -> None:
        self._num_steps = num_steps
        if self._clock() - self._printed_s >= _LINE_EVERY_S:
            self._print()

    def update(self, num_steps: int, epoch: str, numbers: str) -> None:
        self._epoch, self._numbers, self._is_news = epoch, numbers, True
        self.advance(num_steps)
        if self._epoch != self._printed_epoch:
            self._print()

    def note(self, text: str) -> None:
        # In one piece: another thread may end the process, and flush half a line.
        with contextlib.suppress(OSError):  # a full disk, a closed pipe: no reason to end a run
            print(f"{text}\n", end="", file=self._stream, flush=True)

    def _print(self) -> None:
        step = f"{self._unit} {self._num_steps:,}{self._total}"
        self.note("  ".join(filter(None, (self._epoch, step, self._numbers, self._workers))))
        self._printed_epoch, self._is_news = self._epoch, False
        self._printed_s = self._clock()


def _column(text: str) -> TextColumn:
    column = Column(no_wrap=True, overflow="ellipsis")
    return TextColumn(text, markup=False, table_column=column)
