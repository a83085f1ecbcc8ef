"""Runs exchanges of buckets in order, overlapped with the backward pass, with profiler spans.

[Note: spans] A profiler sees the thread in which it was started. So a job's span begins there, when
the job is submitted, and ends with a future, which passes the thread's profiler on to the thread
that completes it. A span that outlives its profiler would write to freed memory; so jobs that may
end after their step have a span in their own thread, which a profiler of all threads sees.
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
        """Submits a call and returns at once.

        Raises:
            UsageError: after `close`.
        """
        if self._is_closed:
            raise UsageError("Nothing can be exchanged after `detach()`; attach the model again.")
        return self._submit(call)

    def close(self, limit_s: float) -> bool:
        """Accepts no more calls; whether the pending ones have ended within `limit_s`."""
        self._is_closed = True
        return True

    @abstractmethod
    def _submit(self, call: Callable[[], None]) -> Work[None]:
        """Submits a call."""


def make_runner(device: torch.device, *, overlaps: bool = True) -> Runner:
    """The runner for tensors on a device.

    Args:
        device: the tensors' device.
        overlaps: whether other work can overlap with the calls.
    """
    if has_streams(device):
        return StreamRunner(device)
    return ThreadRunner() if overlaps else InlineRunner()


class InlineRunner(Runner):
    """Makes each call in the thread that submits it, because nothing overlaps with it.

    After a call failed, all later ones fail with the same error: they would meet other workers'
    earlier calls.
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
    """Makes the calls in a thread; torch's kernels and collectives release the GIL."""

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
    """Makes the calls in a stream besides the backward pass's; the host never waits.

    Its few kernels have priority over waiting ones of the backward pass, to keep the network busy.
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
        name: the span's name.
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
    """A span that is made where a job is submitted, and entered where it runs. [Note: spans]

    Args:
        name: the span's name.
        device: the job's device; on an accelerator the submitting thread runs it at once.
        staleness: number of steps that the job may take.
    """
    if has_streams(device):
        return span(name)
    return record_function(name) if staleness else _JobSpan(name)


def span(name: str) -> AbstractContextManager[object]:
    """A span of the enclosed code in this thread; nothing unless the thread is profiled."""
    return record_function(name) if _profiler_enabled() else _NO_SPAN


class _JobSpan(AbstractContextManager[None]):
    def __init__(self, name: str) -> None:
        self._end = begin_span(name)

    def __exit__(self, *_: object) -> None:
        if self._end is not None:
            self._end.set_result(None)
