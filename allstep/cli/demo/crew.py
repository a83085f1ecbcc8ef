"""Child processes that are gone when the demo is, whatever ends it."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from allstep.comm import Communicator, init
from allstep.errors import AllstepError

__all__ = ["Call", "ChildError", "Crew"]

# Imported once, where all children are forked from; else each takes seconds to begin. The last
# three are imported by an optimizer's, a log's and a backward pass's first use.
_PRELOAD = [
    "allstep.cli.demo.large_batch_runs",
    "allstep.cli.demo.same_model_runs",
    "allstep.cli.demo.slow_wire_runs",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "torch.utils.flop_counter",
]
_TIMEOUT_S = 600.0
_CONTEXT = multiprocessing.get_context("forkserver")

Call = tuple[Callable[..., Any], tuple[Any, ...]]
_AnyProcess = TypeVar("_AnyProcess", "Child", "Command")


class ChildError(AllstepError, RuntimeError):
    """A child ended without its result."""


class Child:
    """A function that runs in a process of its own and returns plain data."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.results, theirs = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_live, args=(theirs, function, arguments), daemon=True
        )
        self._process.start()
        theirs.close()

    def result(self) -> Any:
        """Waits for what the function returns.

        Raises:
            ChildError: if it raised, or its process was killed.
        """
        try:
            if not self.results.poll(_TIMEOUT_S):
                raise ChildError(f"a process of the demo took longer than {_TIMEOUT_S:g} s.")
            outcome = json.loads(self.results.recv_bytes())
        except EOFError:
            self._process.join(_TIMEOUT_S)
            code = self._process.exitcode
            raise ChildError(f"a process of the demo ended with code {code}.") from None
        if "error" in outcome:
            raise ChildError(f"a process of the demo failed:\n{outcome['error']}")
        return outcome["result"]

    def kill(self) -> None:
        """Ends it as `kill -9` does."""
        self._process.kill()
        self._process.join()


class Command:
    """A command line in a process of its own; what it says is kept in a file."""

    def __init__(self, line: Sequence[str], output: Path) -> None:
        self._output = output
        with output.open("w") as stream:
            self._process = subprocess.Popen(line, stdout=stream, stderr=stream)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """The end of what it said."""
        return self._output.read_text()[-2000:]

    def kill(self) -> None:
        """Ends it as `kill -9` does."""
        self._process.kill()
        self._process.wait()


class Crew:
    """Starts children, and kills those that are left at the end of the context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[Child | Command] = []
        self._num_groups = 0
        _CONTEXT.set_forkserver_preload(_PRELOAD)
        with _silence():
            forkserver.ensure_running()

    def each(self, calls: Sequence[Call], at_most: int) -> Iterator[tuple[int, Any]]:
        """(number, result) of each call as they end, some of them at a time."""
        waiting = list(enumerate(calls))
        running: dict[Connection, tuple[int, Child]] = {}
        while waiting or running:
            while waiting and len(running) < at_most:
                number, (function, arguments) = waiting.pop(0)
                child = self._start(Child, function, arguments)
                running[child.results] = number, child
            ready = wait(list(running), _TIMEOUT_S)
            if not ready:
                raise ChildError(f"a process of the demo took longer than {_TIMEOUT_S:g} s.")
            for connection in list(running):
                if connection in ready:
                    number, child = running.pop(connection)
                    yield number, child.result()

    def start_ranks(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Child]:
        """Starts `function(comm, *arguments)` on the ranks of a group, each with one thread."""
        self._num_groups += 1
        store = self._folder / f"store-{self._num_groups}"
        return [
            self._start(Child, _run_rank, (rank, size, str(store), function, arguments))
            for rank in range(size)
        ]

    def run_ranks(self, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of rank 0."""
        children = self.start_ranks(size, function, *arguments)
        results = [child.result() for child in children]
        return results[0]

    def run_commands(self, lines: Sequence[Sequence[str]]) -> None:
        """Runs command lines side by side.

        Raises:
            ChildError: with the end of what one said, if it failed or took too long.
        """
        commands = [
            self._start(Command, line, self._folder / f"command-{number}.log")
            for number, line in enumerate(lines)
        ]
        deadline_s = time.monotonic() + _TIMEOUT_S
        while None in (codes := [command.exit_code for command in commands]):
            if any(codes):
                break
            if time.monotonic() > deadline_s:
                raise ChildError(f"a process of the demo took longer than {_TIMEOUT_S:g} s.")
            time.sleep(0.05)
        for command, code in zip(commands, codes, strict=True):
            if code:
                raise ChildError(f"a process of the demo failed:\n{command.last_words}")

    def _start(self, kind: type[_AnyProcess], *arguments: Any) -> _AnyProcess:
        with _uninterrupted():
            self._processes.append(process := kind(*arguments))
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait: a child that is only half started would be killed by nobody."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What is started meanwhile says nothing, whenever in its life Ctrl-C reaches it."""
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with open(os.devnull, "w") as nowhere:
            for number in (1, 2):
                os.dup2(nowhere.fileno(), number)
        yield
    finally:
        for number, stream in zip((1, 2), kept, strict=True):
            os.dup2(stream, number)
            os.close(stream)


def _live(results: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        outcome = {"result": function(*arguments)}
    except BaseException:
        outcome = {"error": traceback.format_exc()}
    with contextlib.suppress(BrokenPipeError):
        results.send_bytes(json.dumps(outcome).encode())


def _run_rank(
    rank: int, size: int, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    with _join(rank, size, store) as comm:
        result = function(comm, *arguments)
        comm.barrier()
        return result


def _join(rank: int, size: int, store: str) -> Communicator:
    if size == 1:
        return Communicator.single_process()
    timeout = timedelta(seconds=_TIMEOUT_S)
    meeting = FileStore(store, size)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=timeout)
    return init(device="cpu", timeout_s=_TIMEOUT_S)
