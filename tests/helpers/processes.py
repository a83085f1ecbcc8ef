"""Ranks as real processes, which can be killed."""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import runpy
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._C._distributed_c10d import TCPStore

from allstep.comm import init
from allstep.errors import PeerLostError

__all__ = ["RemoteError", "Workers", "run_processes", "run_script", "start_processes"]

_CONTEXT = multiprocessing.get_context("forkserver")
# What children would import, each in seconds; torch's optimizers import `torch._dynamo`.
_CONTEXT.set_forkserver_preload(
    [
        "allstep",
        "pytest",
        "sklearn.datasets",
        "torch.distributed.device_mesh",
        "torch._dynamo",
        "torch.utils.tensorboard",
    ]
)

_GRACE_S = 5.0
_SHOW_STACKS = signal.SIGUSR1


class RemoteError(RuntimeError):
    """A rank raised; the message is its traceback."""


@dataclass(frozen=True)
class _Outcome:
    """What a rank came to: a result, or a traceback and how likely it is no cause (0 to 2)."""

    rank: int
    value: Any
    severity: int | None = None


class Workers:
    """Processes that run `fn(*args)`, one a rank; as a context manager it leaves none.

    They are told what torchrun would tell them; a lone one may be told nothing.
    """

    def __init__(
        self,
        n: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
        *,
        is_told: bool = True,
    ) -> None:
        # The parent serves the store, as torchrun's agent does: no port is guessed or raced for.
        self._store = TCPStore(
            "127.0.0.1", 0, n, True, timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        for rank in range(n):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            environ = _as_of_torchrun(rank, n, self._store.port) if is_told else {}
            process = _CONTEXT.Process(
                target=_work,
                args=(rank, environ, theirs, fn, args),
                name=f"rank {rank}",
                daemon=False,  # may start DataLoader workers of its own
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid or 0 for process in self._processes]

    @property
    def exit_codes(self) -> list[int | None]:
        """By rank: None while it runs, negative if a signal ended it."""
        return [process.exitcode for process in self._processes]

    def kill(self, *ranks: int, signal_number: int = signal.SIGKILL) -> None:
        """Sends a signal to some ranks; to all if none is named."""
        for rank in ranks or range(len(self._processes)):
            if self._processes[rank].is_alive():
                os.kill(self.pids[rank], signal_number)

    def join(self, timeout_s: float = 60.0) -> list[int | None]:
        """Waits until all have ended, and returns their exit codes.

        As torchrun does, it kills those who go on some seconds after another has failed: they
        may be waiting for it to join them. TimeoutError, and all killed, after `timeout_s`.
        """
        deadline = failed_deadline = time.monotonic() + timeout_s
        while running := [p for p in self._processes if p.exitcode is None]:
            if any(self.exit_codes) and failed_deadline == deadline:
                failed_deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() >= failed_deadline:
                self.close()
                break
            wait([p.sentinel for p in running], failed_deadline - time.monotonic())
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{[p.name for p in running]} did not end within {timeout_s:g} s")
        return self.exit_codes

    def results(self, timeout_s: float = 60.0) -> list[Any]:
        """What the ranks returned; RemoteError with the causing traceback if one raised or died."""
        deadline = time.monotonic() + timeout_s
        outcomes: dict[int, _Outcome] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                outcomes[rank] = self._receive(rank, pipe)
                if outcomes[rank].severity is not None:  # the others' words may say more
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        failures = [outcome for outcome in outcomes.values() if outcome.severity is not None]
        if failures:
            worst = min(failures, key=lambda outcome: outcome.severity or 0)
            raise RemoteError(f"on rank {worst.rank}:\n{worst.value}")
        if waiting:
            self._show_stacks()
            raise TimeoutError(
                f"ranks {sorted(waiting.values())} returned nothing within {timeout_s:g} s"
            )
        self.join(_GRACE_S)
        return [outcomes[rank].value for rank in range(len(self._processes))]

    def _receive(self, rank: int, pipe: Connection) -> "_Outcome":
        try:
            outcome: _Outcome = pickle.loads(pipe.recv_bytes())
        except EOFError:
            self._processes[rank].join(_GRACE_S)
            return _Outcome(rank, f"it died (exit code {self.exit_codes[rank]})", severity=1)
        return outcome

    def _show_stacks(self) -> None:
        """Has the ranks and their loader processes write to stderr where they are."""
        for pid in self.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank = psutil.Process(pid)
                for process in (rank, *rank.children(recursive=True)):
                    process.send_signal(_SHOW_STACKS)
        time.sleep(0.5)

    def close(self) -> None:
        """Ends what still runs."""
        self.kill()
        for process in self._processes:
            process.join(10)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start_processes(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> Workers:
    """Starts n processes that run `fn(comm, *args)`; `fn` is importable, results are picklable."""
    return Workers(n, _with_comm, (timeout_s, fn, args), timeout_s)


def run_processes(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Runs `fn(comm, *args)` in n processes and returns the results, by rank."""
    with start_processes(n, fn, *args, timeout_s=timeout_s) as workers:
        return workers.results(timeout_s)


def run_script(n: int, script: Path, folder: Path, timeout_s: float = 60.0) -> list[str]:
    """Runs a script in a folder, warnings being errors, and returns what each process prints.

    Several processes are told what torchrun would tell them, a lone one nothing.
    """
    arguments = (script, folder)
    with Workers(n, _run_script, arguments, timeout_s, is_told=n > 1) as workers:
        return workers.results(timeout_s)


def _run_script(script: Path, folder: Path) -> str:
    os.chdir(folder)
    warnings.simplefilter("error")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def _with_comm(timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with init(device="cpu", timeout_s=timeout_s) as comm:
        result = fn(comm, *args)
        comm.barrier()
    return result


def _work(
    rank: int,
    environ: Mapping[str, str],
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """A child's life."""
    faulthandler.register(_SHOW_STACKS)
    torch.set_num_threads(1)
    # As in a worker that was not started so itself: a loader's processes are forked.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(environ)
    try:
        result = fn(*args)
    except BaseException as error:
        severity = 2 if isinstance(error, PeerLostError) else 0
        _send(pipe, _Outcome(rank, traceback.format_exc(), severity))
        raise SystemExit(1) from None
    _send(pipe, _Outcome(rank, result))


def _as_of_torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment that torchrun would give a worker."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _send(pipe: Connection, outcome: _Outcome) -> None:
    """By value: torch would share tensors through this process, which is about to end."""
    pipe.send_bytes(pickle.dumps(outcome))


def names_in_dev_shm() -> set[str]:
    """What allstep could have left there; other tests at the same time come and go."""
    names = os.listdir("/dev/shm")
    return {name for name in names if not name.startswith(("sem.", "torch_"))}
