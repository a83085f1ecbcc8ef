"""Runs exchanges of buckets in order, beside the backward pass."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol

import torch

from allstep.comm.wire import Posted
from allstep.errors import CollectiveTimeoutError, UsageError

__all__ = ["Job", "PostedJob", "Runner", "StreamRunner", "ThreadRunner", "make_runner"]


class Job(Protocol):
    """Work that was handed to a runner."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for its end, on CUDA in the stream alone; raises what it raised."""


class Runner(Protocol):
    """Runs jobs one after the other, in the order in which they were submitted."""

    def submit(self, work: Callable[[], None]) -> Job:
        """Takes a job and returns at once.

        Raises:
            UsageError: after `close`.
        """

    @property
    def busy_s(self) -> float:
        """Seconds spent in jobs so far."""

    def close(self) -> None:
        """Takes no more jobs."""


def make_runner(device: torch.device) -> Runner:
    """The runner for tensors on a device."""
    return StreamRunner(device) if device.type == "cuda" else ThreadRunner()


class _ThreadJob:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self, earlier_error: BaseException | None) -> BaseException | None:
        """Does the work, unless an earlier job failed; returns the error."""
        self._error = earlier_error
        if earlier_error is None:
            try:
                with torch.no_grad():
                    self._work()
            except BaseException as error:
                self._error = error
        self._done.set()
        return self._error

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._done.wait(timeout_s):
            raise CollectiveTimeoutError(f"An exchange has not ended after {timeout_s:g} s.")
        if self._error is not None:
            raise self._error


class ThreadRunner:
    """A thread that runs the jobs; torch's kernels and collectives leave it free to overlap.

    After a job failed the others fail with the same error: what follows would meet the other
    workers' earlier calls.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_ThreadJob | None] = SimpleQueue()
        self._busy_s = 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def busy_s(self) -> float:
        return self._busy_s

    def submit(self, work: Callable[[], None]) -> Job:
        _refuse_closed(self._is_closed)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="allstep exchange", daemon=True)
            self._thread.start()
        job = _ThreadJob(work)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        self._is_closed = True
        self._jobs.put(None)

    def _run(self) -> None:
        error: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            start_s = perf_counter()
            error = job.run(error)
            self._busy_s += perf_counter() - start_s
            del job  # it holds the exchange, which would else live as long as this thread waits


class PostedJob:
    """A call that a backend works on by itself, and what is left to do after it.

    Args:
        posted: the call.
        finish: done once, by whoever waits first.
        count_s: takes the seconds from its start to its end.
    """

    def __init__(
        self, posted: Posted, finish: Callable[[], None], count_s: Callable[[float], None]
    ) -> None:
        self._posted = posted
        self._finish: Callable[[], None] | None = finish
        self._start_s = perf_counter()
        self._count_s = count_s

    def wait(self, timeout_s: float | None = None) -> None:
        if self._finish is None:
            return
        self._posted.wait(timeout_s)
        self._count_s(self._start_s)
        finish, self._finish = self._finish, None
        with torch.no_grad():
            finish()


class StreamRunner:
    """A CUDA stream beside the one of the backward pass; the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._busy_s = 0.0
        self._is_closed = False

    @property
    def busy_s(self) -> float:
        return self._busy_s

    def submit(self, work: Callable[[], None]) -> Job:
        _refuse_closed(self._is_closed)
        start_s = perf_counter()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            work()
        self._busy_s += perf_counter() - start_s
        return _StreamJob(self._stream.record_event())

    def close(self) -> None:
        self._is_closed = True


class _StreamJob:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, timeout_s: float | None = None) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def _refuse_closed(is_closed: bool) -> None:
    if is_closed:
        raise UsageError("Nothing can be exchanged after `detach()`; attach the model again.")
