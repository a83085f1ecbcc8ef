"""The demo's workers, which are gone when the demo is, whatever ends it."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from allstep.cli.launch import Workers
from allstep.cli.worker import last_lines, read_result
from allstep.cli.workers import Body, call_of
from allstep.doctor import ShapedHosts
from allstep.errors import AllstepError

# Imported once, where all workers are forked from; else each takes seconds to begin. The last
# three are imported by an optimizer's, a log's and a backward pass's first use.
PRELOAD = (
    "allstep.cli.demo.large_batch",
    "allstep.cli.demo.same_model",
    "allstep.cli.demo.slow_wire_runs",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "torch.utils.flop_counter",
)
_NUM_LOG_LINES = 30
_ONE_THREAD = {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1}

Call = tuple[Body, dict[str, Any]]


class WorkerError(AllstepError, RuntimeError):
    """A worker ended without its result."""


class Processes:
    """Starts workers, and kills those that are left at the end of the context.

    Args:
        folder: for what they are asked, what they answer and what they print.
        timeout_s: longest time that workers may take.
        preload: modules that workers are forked with.
    """

    def __init__(
        self, folder: Path, timeout_s: float = 600.0, preload: Sequence[str] = PRELOAD
    ) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._preload = preload
        self._started: list[Workers] = []

    def start(self, size: int, body: Body, **arguments: Any) -> Workers:
        """Starts `body(comm, **arguments)` on the ranks of a group.

        All but one may be lost if the arguments have `elastic`.
        """
        min_workers = 1 if arguments.get("elastic") else None
        return self._start(size, (body, arguments), preload=self._preload, min_workers=min_workers)

    def run(self, size: int, body: Body, **arguments: Any) -> Any:
        """What rank 0 returns."""
        return self.result(self.start(size, body, **arguments))

    def run_on_hosts(self, hosts: ShapedHosts, body: Body, **arguments: Any) -> Any:
        """The same with a worker on each of two hosts, with one thread."""
        lines = partial(hosts.commands, variables=_ONE_THREAD)
        return self.result(self._start(2, (body, arguments), hosts=lines))

    def each(self, calls: Sequence[Call], at_most: int) -> Iterator[tuple[int, Any]]:
        """(number, what it returns) of each call on a single worker, some of them at a time."""
        waiting = list(enumerate(calls))
        running: dict[int, Workers] = {}
        while waiting or running:
            while waiting and len(running) < at_most:
                number, (body, arguments) = waiting.pop(0)
                running[number] = self.start(1, body, **arguments)
            time.sleep(0.02)
            for number, workers in list(running.items()):
                if workers.wait(0) or self._is_late(workers):
                    yield number, self.result(running.pop(number))

    def result(self, workers: Workers) -> Any:
        """What rank 0 of some workers returned, when all have ended.

        Raises:
            WorkerError: if a worker fails, is killed or takes too long.
        """
        while not workers.wait(0.05) and not any(workers.exit_codes) and not self._is_late(workers):
            pass
        for rank, code in enumerate(workers.exit_codes):
            if code:
                lines = last_lines(workers.folder, rank, _NUM_LOG_LINES)
                said = "\n".join([":", *lines]) if lines else "."
                raise WorkerError(f"a process of the demo ended with code {code}{said}")
        if None in workers.exit_codes:
            raise WorkerError(f"a process of the demo took longer than {self._timeout_s:g} s.")
        return read_result(workers.folder)

    def _is_late(self, workers: Workers) -> bool:
        return time.monotonic() > workers.start_s + self._timeout_s

    def _start(self, size: int, call: Call, **options: Any) -> Workers:
        folder = self._folder / f"workers-{len(self._started)}"
        folder.mkdir()
        workers = Workers(size, *call_of(folder, *call), has_logs=True, **options)
        self._started.append(workers)
        return workers.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for workers in self._started:
            workers.close()
