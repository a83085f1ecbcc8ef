"""Runs exchanges of buckets in order, beside the backward pass."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol

import torch

from allstep.comm.work import StreamWork, ThreadWork, Work
from allstep.errors import UsageError

__all__ = ["Runner", "StreamRunner", "ThreadRunner", "make_runner"]


class Runner(Protocol):
    """Makes calls one after the other, in the order in which they were submitted."""

    def submit(self, call: Callable[[], None]) -> Work[None]:
        """Takes a call and returns at once.

        Raises:
            UsageError: after `close`.
        """

    @property
    def busy_s(self) -> float:
        """Seconds spent in calls so far."""

    def close(self) -> None:
        """Takes no more calls."""


def make_runner(device: torch.device) -> Runner:
    """The runner for tensors on a device."""
    return StreamRunner(device) if device.type == "cuda" else ThreadRunner()


class ThreadRunner:
    """A thread that makes the calls; torch's kernels and collectives leave it free to overlap.

    After a call failed the others fail with the same error: what follows would meet the other
    workers' earlier ones.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[ThreadWork[None] | None] = SimpleQueue()
        self._busy_s = 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def busy_s(self) -> float:
        return self._busy_s

    def submit(self, call: Callable[[], None]) -> Work[None]:
        _refuse_closed(self._is_closed)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="allstep exchange", daemon=True)
            self._thread.start()
        work = ThreadWork(call, "The exchange of a bucket")
        self._queue.put(work)
        return work

    def close(self) -> None:
        self._is_closed = True
        self._queue.put(None)

    @torch.no_grad()
    def _run(self) -> None:
        error: BaseException | None = None
        while (work := self._queue.get()) is not None:
            start_s = perf_counter()
            error = work.run(error)
            self._busy_s += perf_counter() - start_s
            del work  # it holds the exchange, which would else live as long as this thread waits


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

    def submit(self, call: Callable[[], None]) -> Work[None]:
        _refuse_closed(self._is_closed)
        start_s = perf_counter()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            call()
        self._busy_s += perf_counter() - start_s
        return StreamWork(self._stream.record_event())

    def close(self) -> None:
        self._is_closed = True


def _refuse_closed(is_closed: bool) -> None:
    if is_closed:
        raise UsageError("Nothing can be exchanged after `detach()`; attach the model again.")
