"""Spans in torch.profiler's traces for jobs of other threads.

[Note: spans] A profiler sees the thread that it was started in. So a job's span begins there, when
it is handed over, and ends with a future, which carries the thread's profiler along to where it is
completed. A span that outlasts its profiler would be written to memory that is no longer its own;
jobs that may end after their step therefore have a span of their own thread, which a profiler of
all threads sees.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.futures import Future
from torch.profiler import record_function

__all__ = ["begin_span", "job_span"]


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
        device: of the job: on CUDA the thread that hands it over does it at once, in a stream.
        staleness: steps that the job may take.
    """
    return _JobSpan(name) if device.type == "cpu" and not staleness else record_function(name)


class _JobSpan(AbstractContextManager[None]):
    def __init__(self, name: str) -> None:
        self._end = begin_span(name)

    def __exit__(self, *_: object) -> None:
        if self._end is not None:
            self._end.set_result(None)
