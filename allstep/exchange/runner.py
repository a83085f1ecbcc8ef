"""Runs exchanges of buckets in order, beside the backward pass, and shows them to a profiler.

[Note: spans] A profiler sees the thread that it was started in. So a job's span begins there, when
it is handed over, and ends with a future, which carries the thread's profiler along to where it is
completed. A span that outlasts its profiler would be written to memory that is no longer its own;
jobs that may end after their step therefore have a span of their own thread, which a profiler of
all threads sees.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.futures import Future
from torch.profiler import record_function

from allstep.comm.work import StreamWork, ThreadWork, Work
from allstep.device import current_stream, has_streams, new_stream
from allstep.errors import UsageError

_NO_SPAN = nullcontext()


class Runner(ABC):
    """Makes calls one after the other, in the order in which they were submitted.

    Attributes:
        busy_s: seconds spent in calls so far.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._is_closed = False

    def submit(self, call: Callable[[], None]) -> Work[None]:
        """Takes a call and returns at once.

        Raises:
            UsageError: after `close`.
        """
        if self._is_closed:
            raise UsageError("Nothing can be exchanged after `detach()`; attach the model again.")
        return self._submit(call)

    def close(self, limit_s: float) -> bool:
        """Takes no more calls; whether those under way have ended within `limit_s`."""
        self._is_closed = True
        return True

    @abstractmethod
    def _submit(self, call: Callable[[], None]) -> Work[None]:
        """Takes a call."""


def make_runner(device: torch.device, *, overlaps: bool = True) -> Runner:
    """The runner for tensors on a device.

    Args:
        device: where the tensors are.
        overlaps: whether there is something to do beside the calls.
    """
    if has_streams(device):
        return StreamRunner(device)
    return ThreadRunner() if overlaps else InlineRunner()


class InlineRunner(Runner):
    """The thread that submits a call makes it, as nothing is to be done beside.

    After a call failed the others fail with the same error: what follows would meet the other
    workers' earlier ones.
    """

    _error: BaseException | None = None

    def _submit(self, call: Callable[[], None]) -> Work[None]:
        work = ThreadWork(call, "The exchange of a bucket")
        self._make(work)
        return work

    def _make(self, work: ThreadWork[None]) -> None:
        start_s = perf_counter()
        with torch.no_grad():
            self._error = work.run(self._error)
        self.busy_s += perf_counter() - start_s


class ThreadRunner(InlineRunner):
    """A thread makes the calls; torch's kernels and collectives leave it free to overlap."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: SimpleQueue[ThreadWork[None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def close(self, limit_s: float) -> bool:
        super().close(limit_s)
        self._queue.put(None)
        if self._thread is None:
            return True
        if self._thread is not threading.current_thread():  # where garbage is collected anywhere
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _make(self, work: ThreadWork[None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="allstep exchange", daemon=True)
            self._thread.start()
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            super()._make(work)
            del work  # it holds the exchange, which would else live as long as this thread waits


class StreamRunner(Runner):
    """A stream beside the one of the backward pass; the host never waits.

    Its few kernels go before those of the backward pass that wait, so that the network has work.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = new_stream(device, is_urgent=True)
        self._device = device

    def _submit(self, call: Callable[[], None]) -> Work[None]:
        start_s, stream = perf_counter(), self._stream
        stream.wait_stream(current_stream(self._device))
        with stream:  # nothing here requires a gradient
            call()
        self.busy_s += perf_counter() - start_s
        return StreamWork(stream.record_event(), self._device)


def begin_span(name: str, end: Callable[[], Future[Any]] = Future) -> Future[Any] | None:
    """Begins a span that ends with a future; None unless this thread is profiled.

    Args:
        name: of the span.
        end: makes the future, which must be completed before the profiler is stopped.
    """
    if not _profiler_enabled():
        return None
    span = record_function(name)
    span.__enter__()  # type: ignore[no-untyped-call]
    future = end()
    span._call_end_callbacks_on_future(future)
    return future


def job_span(name: str, device: torch.device, staleness: int) -> AbstractContextManager[object]:
    """Made where a job is handed over, entered where it is done. [Note: spans]

    Args:
        name: of the span.
        device: of the job: on an accelerator whoever hands it over does it at once, in a stream.
        staleness: steps that the job may take.
    """
    if has_streams(device):
        return span(name)
    return record_function(name) if staleness else _JobSpan(name)


def span(name: str) -> AbstractContextManager[object]:
    """Of what this thread does inside, at once; nothing unless it is profiled."""
    return record_function(name) if _profiler_enabled() else _NO_SPAN


class _JobSpan(AbstractContextManager[None]):
    def __init__(self, name: str) -> None:
        self._end = begin_span(name)

    def __exit__(self, *_: object) -> None:
        if self._end is not None:
            self._end.set_result(None)
