"""Starts workers on this machine, watches them, and reports how they ended.

[Note: a worker's process] Each worker is `allstep worker MODULE:FUNCTION FOLDER` in a session of
its own, or is forked from a process that has imported what it needs. It is told what torchrun
would tell it; this process serves the store in which the workers meet, unless `allstep store`
does. Workers begin with SIGINT and SIGTERM blocked, and unblock them when they can answer: an
interpreter that is only starting would answer Ctrl-C with a traceback. While they are started this
process takes no signal, so that it knows every worker that it has to end.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

from torch._C._distributed_c10d import TCPStore

from allstep.cli.exits import (
    Exits,
    StoreAddress,
    StoreRecord,
    forget_exits,
    keeping_store,
    signal_name,
    write_exits,
)
from allstep.cli.interruptible import SIGNALS, signals_handled
from allstep.cli.worker import log_path, run_forked, write_call
from allstep.comm import Place, await_others, note_ended, open_store
from allstep.env import (
    address_towards,
    environment_of_joiner,
    environment_of_worker,
    is_loopback,
    make_room,
)
from allstep.train import FAILED, PEER_LOST, REPEAT_S, REPORTED

# After Ctrl-C or SIGTERM workers finish their step and write a checkpoint; a second signal
# ends them at once, so this only bounds a wait that nobody watches.
_SHUTDOWN_S = 600.0
_GRACE_S = 30.0  # of the others after one has failed
_KILLED_S = 10.0
_STORE_TIMEOUT_S = 300.0
_SILENCE_S = 60.0  # of another host's store, which is gone then
_POLL_S = 0.05
_CONTEXT = multiprocessing.get_context("forkserver")

_Process = subprocess.Popen[bytes] | ForkServerProcess


@dataclass(eq=False)
class Workers:
    """Processes that run a function of a module, one a rank; as a context manager it leaves none.

    Args:
        num_workers: processes to start.
        function: `MODULE:FUNCTION`; called with the folder, returns an exit code or None.
        folder: holds the arguments, and takes results, reports of failures and logs.
        arguments: plain data, for `allstep.cli.worker.read_call`.
        preload: modules to import once, where workers are forked from then; without any, each
            worker is a Python of its own. What the first in this process asks for is imported.
        has_logs: keep what workers print in the folder instead of printing it.
        min_workers: how few may go on when others are lost; None if all end with the first.
        joins: where the workers are of a run that these join; None to begin one.
        store: the one that `allstep store` serves, for a run that these begin; None to serve one.
        hosts: makes of a command line one for each worker, which says who it is; by default
            workers are told by this process.

    Attributes:
        start_s: when they were started, of `time.monotonic`.
        store_address: where they meet, for others that join.
    """

    num_workers: int
    function: str
    folder: Path
    arguments: Mapping[str, Any]
    _: KW_ONLY
    preload: Sequence[str] = ()
    has_logs: bool = False
    min_workers: int | None = None
    joins: StoreAddress | None = None
    store: tuple[str, int] | None = None
    hosts: Callable[[Sequence[str]], list[list[str]]] | None = None

    def __post_init__(self) -> None:
        self.start_s = 0.0
        host, port = self.store or ("127.0.0.1", 0)
        self.store_address = self.joins or StoreAddress(host, port, uuid.uuid4().hex)
        self._processes: list[_Process] = []
        self._places: list[Place] = []
        self._cleaned_up: set[int] = set()  # ranks

    def start(self) -> Self:
        """Starts all workers; delays signals until all process ids are known."""
        if self.preload:
            resource_tracker.ensure_running()  # it would let signals in
        try:
            with _signals_held():
                self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        self.start_s = time.monotonic()
        write_call(self.folder, self.arguments, None if self.preload else os.getpid())
        size = self.num_workers
        self._open_store()
        make_room(4 * size + 64)  # pipes to workers, and their connections
        address, port, job_id = self.store_address
        for rank in range(size):
            file = self.error_file(rank)
            file.parent.mkdir()
            environ = environment_of_worker(
                rank, size, port, job_id, file, self.min_workers, address
            )
            if self.joins is not None:
                environ = environment_of_joiner(environ)
            start = self._fork if self.preload else self._spawn
            self._processes.append(start(rank, environ))
            self._places.append(Place.of_process(self.pids[rank]))

    def _open_store(self) -> None:
        host, port, _ = self.store_address
        if self.store is not None or self.joins is not None:
            self._store = open_store(host, port, _SILENCE_S)
            return
        size, timeout = self.num_workers, timedelta(seconds=_STORE_TIMEOUT_S)
        self._store = TCPStore(host, port, size, True, timeout, wait_for_workers=False)
        self.store_address = self.store_address._replace(port=self._store.port)

    def _fork(self, rank: int, environ: dict[str, str]) -> _Process:
        _CONTEXT.set_forkserver_preload(list(self.preload))
        log = log_path(self.folder, rank) if self.has_logs else None
        process = _CONTEXT.Process(
            target=run_forked,
            args=(self.function, self.folder, environ, log),
            name=f"rank {rank}",
            daemon=False,  # it may have children of its own
        )
        process.start()
        return process

    def _spawn(self, rank: int, environ: dict[str, str]) -> _Process:
        line = [sys.executable, "-m", "allstep", "worker", self.function, str(self.folder)]
        if self.hosts is not None:
            line = self.hosts(line)[rank]
        with contextlib.ExitStack() as stack:
            log = None
            if self.has_logs:
                log = stack.enter_context(log_path(self.folder, rank).open("wb"))
            return subprocess.Popen(
                line,
                env=None if self.hosts is not None else environ,
                stdin=subprocess.DEVNULL if self.has_logs else None,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def error_file(self, rank: int) -> Path:
        """The file to which a worker reports its failure, as torchrun's workers do."""
        return self.folder / str(rank) / "error.json"

    @property
    def first_reported(self) -> int | None:
        """The rank that reported its failure first; None if none has."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / REPORTED).read_text())
        return None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid or 0 for process in self._processes]

    @property
    def exit_codes(self) -> list[int | None]:
        """Exit codes by rank: None while it runs, negative if a signal ended it."""
        return [_exit_code(process) for process in self._processes]

    def send(self, number: int, *ranks: int) -> None:
        """Sends a signal to the given ranks, or to all, if they still run."""
        for rank in ranks or range(len(self._processes)):
            if _exit_code(self._processes[rank]) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], number)

    def wait(self, timeout_s: float) -> bool:
        """Waits until one more worker has ended, or `timeout_s`; whether all have ended."""
        running = [process for process in self._processes if _exit_code(process) is None]
        forked = [process.sentinel for process in running if isinstance(process, ForkServerProcess)]
        if forked:
            wait(forked, timeout_s)
        elif running:
            time.sleep(min(timeout_s, _POLL_S))
        return None not in self.exit_codes

    def await_others(self, came: Sequence[int]) -> int | None:
        """Waits for workers that have joined, as long as they go on without these.

        Args:
            came: signals that this process got, and may still get: they are asked to stop then.

        Returns:
            The code with which the training has ended; None if it has not.
        """
        if self.joins is not None:
            return None
        return await_others(self._store, self.store_address.job_id, came, _impatience(came))

    def note_ended(self, rank: int) -> int | None:
        """Records the end of an elastic worker for the other hosts.

        Returns:
            The code that the worker gave as it came to the end of the training, if it did.
        """
        with contextlib.suppress(RuntimeError):  # there is no store any more
            return note_ended(self._store, self.store_address.job_id, self._places[rank])
        return None

    def kill_left_behind(self, rank: int) -> None:
        """Kills the remaining processes of a failed worker, such as its loader's.

        Only once and at once: later its process id may be another one's.
        """
        if rank not in self._cleaned_up:
            self._cleaned_up.add(rank)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pids[rank], signal.SIGKILL)

    def close(self) -> None:
        """Kills the workers that still run, and the remaining processes of failed ones."""
        for rank, process in enumerate(self._processes):
            code = _exit_code(process)
            if code != 0:
                self.kill_left_behind(rank)
            if code is None:
                process.kill()
        for process in self._processes:
            if isinstance(process, ForkServerProcess):
                process.join(_KILLED_S)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILLED_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def _impatience(came: Sequence[int]) -> Callable[[], bool]:
    """Reads signals; whether a second one was meant, or the first came long ago."""
    seen_at_s: list[float] = []

    def look() -> bool:
        now_s = time.monotonic()
        seen_at_s.extend(now_s for _ in came[len(seen_at_s) :])
        if not seen_at_s:
            return False
        first_s, last_s = seen_at_s[0], seen_at_s[-1]
        return last_s - first_s > REPEAT_S or now_s - first_s > _SHUTDOWN_S

    return look


def _exit_code(process: _Process) -> int | None:
    return process.exitcode if isinstance(process, ForkServerProcess) else process.poll()


def launch_workers(workers: Workers, run_dir: Path | None = None) -> int:
    """Runs workers until all have ended; if one fails, ends the others, unless they are elastic.

    Args:
        workers: that are not started yet.
        run_dir: where to leave how they ended, for `allstep why`.

    Returns:
        0; the exit code of the worker that failed first; 128 + the signal that this process got.
    """
    min_workers = workers.min_workers
    with signals_noted() as came, workers, contextlib.ExitStack() as stack:
        forget_exits(run_dir)
        if run_dir is not None and min_workers is not None:  # in the folder of a run of its own
            stack.enter_context(keeping_store(run_dir, _record_of(workers, min_workers)))
        watch = Watch(workers, came)
        while not watch.look(_POLL_S):
            pass
        code = None if watch.failed else 0
        if watch.failed and min_workers is not None and not watch.failed_behind:
            # Others may have come to the end without them.
            code = 0 if 0 in workers.exit_codes else workers.await_others(came)
        if code is None and run_dir is not None:
            watch.write_exits(run_dir)
        if came:
            return 128 + came[0]
        if code is not None:
            return code
        if death := watch.words_of_death():  # which no worker could say itself
            print(f"error: {death}", file=sys.stderr)
            return FAILED
        code = workers.exit_codes[watch.root_cause] or 0
        return FAILED if code == PEER_LOST else code


def _record_of(workers: Workers, min_workers: int) -> StoreRecord:
    host, port, job_id = workers.store_address
    is_apart = workers.store is not None
    record = StoreRecord(port=port, job_id=job_id, min_workers=min_workers, is_apart=is_apart)
    if is_loopback(address_towards(host)):  # on this host, whose addresses others reach
        return record
    return replace(record, host=host, addresses=[host])


class Watch:
    """Watches workers until they end: forwards signals, and ends the others if one has failed.

    Args:
        workers: which run.
        came: signals that this process got, and may still get.

    Attributes:
        failed: ranks, the first first.
        failed_behind: those of them that had come to the end of a training in which workers may go
            on without each other; nobody does what their script has still to do.
        killed: ranks that had to be.
    """

    def __init__(self, workers: Workers, came: Sequence[int]) -> None:
        self.workers = workers
        self.failed: list[int] = []
        self.failed_behind: list[int] = []
        self.killed: list[int] = []
        self._came = came
        self._num_sent = 0
        self._ended: set[int] = set()
        self._deadline_s = math.inf

    def look(self, timeout_s: float) -> bool:
        """Waits until one more worker has ended, or `timeout_s`; whether all have ended."""
        workers = self.workers
        is_over = workers.wait(timeout_s)
        codes = workers.exit_codes
        new = [rank for rank, code in enumerate(codes) if code and rank not in self.failed]
        self.failed += new
        for rank in new:
            workers.kill_left_behind(rank)
        if workers.min_workers is not None:
            self._note_ended(codes)
            lost = [rank for rank in new if rank not in self.failed_behind]
            if lost and not is_over:
                _tell_of_lost(workers, lost)
        if not is_over:
            self._end_them()
        return is_over

    def _note_ended(self, codes: Sequence[int | None]) -> None:
        ended = {rank for rank, code in enumerate(codes) if code is not None} - self._ended
        self._ended |= ended
        for rank in sorted(ended):
            code_at_end = self.workers.note_ended(rank)
            if codes[rank] and code_at_end is not None and codes[rank] != code_at_end:
                self.failed_behind.append(rank)

    def _end_them(self) -> None:
        """Tells workers to end if they must, and kills those that still run long afterwards."""
        workers, now_s = self.workers, time.monotonic()
        if len(self._came) > self._num_sent:
            self._deadline_s = min(self._deadline_s, now_s + _SHUTDOWN_S)
            workers.send(self._came[self._num_sent])
            self._num_sent += 1
        must_end = self.failed and workers.min_workers is None
        if must_end and not self._came and self._deadline_s == math.inf:
            self._deadline_s = now_s + _GRACE_S
            workers.send(signal.SIGTERM)
        if now_s > self._deadline_s:
            self.killed = [rank for rank, code in enumerate(workers.exit_codes) if code is None]
            workers.close()

    @property
    def root_cause(self) -> int:
        """The worker that failed first of all: by its report, a kill, or the order of ends.

        Of those that may go on without each other the last one ended the run.
        """
        workers, failed = self.workers, self.failed
        reported = workers.first_reported

        def order(rank: int) -> tuple[bool, bool, bool, int]:
            has_lost_peer = workers.exit_codes[rank] == PEER_LOST
            if workers.min_workers is not None:
                is_behind = rank in self.failed_behind
                return (not is_behind, False, has_lost_peer, -failed.index(rank))
            has_reported = workers.error_file(rank).is_file()
            return (rank != reported, not has_reported, has_lost_peer, failed.index(rank))

        return min(failed, key=order)

    def words_of_death(self) -> str:
        """A message about the worker that failed first, if a signal ended it; else empty."""
        rank = self.root_cause
        number = -(self.workers.exit_codes[rank] or 0)
        if number <= 0:
            return ""
        hint = " (out of memory?)" if number == signal.SIGKILL else ""
        if rank in self.killed:
            hint = f", for it had not ended {_GRACE_S:g} s after the others: was it stopped?"
        return f"worker {rank} was killed by {signal_name(number)}{hint}"

    def write_exits(self, run_dir: Path) -> None:
        """Records how the workers ended, for `allstep why`."""
        workers = self.workers
        exits = Exits(workers.exit_codes, self.root_cause, self.killed, workers.pids)
        write_exits(run_dir, exits)


def _tell_of_lost(workers: Workers, ranks: Sequence[int]) -> None:
    """Logs which elastic workers were lost."""
    for rank in ranks:
        code = workers.exit_codes[rank] or 0
        if code > 128:  # it was asked to end, and the others with it
            continue
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with {code}"
        pid = workers.pids[rank]
        print(f"worker {rank} (process {pid}) {how}; the others go on", file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in the order in which they come, without handling them."""
    came: list[int] = []
    with signals_handled(lambda number, frame: came.append(number)):
        yield came


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Delays SIGINT and SIGTERM until the end; processes started inside block them."""
    with signals_noted() as came:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if came:
        signal.raise_signal(came[0])
