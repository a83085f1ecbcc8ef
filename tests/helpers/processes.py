"""Ranks as real processes, which can be killed."""

import contextlib
import faulthandler
import io
import math
import multiprocessing
import os
import pickle
import runpy
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from allstep.cli import launch
from allstep.cli.interruptible import SIGNALS
from allstep.comm import init
from allstep.env import forget_launch, read_launch
from allstep.errors import PeerLostError
from allstep.files import replacing
from tests.helpers.simulation.scratch import PREFIX

__all__ = [
    "RemoteError",
    "Workers",
    "run_processes",
    "run_script",
    "start_forkserver",
    "start_processes",
]

_PRELOAD = ["tests.helpers.preloaded"]

_GRACE_S = 5.0
_PATIENCE_S = 240.0  # on a busy machine, too; pytest ends a test after 300
_SHOW_STACKS = signal.SIGUSR1


class RemoteError(RuntimeError):
    """A rank raised; the message is its traceback."""


def start_forkserver() -> None:
    """Starts what all processes of these tests are forked from, before one asks for fewer modules.

    As a launcher does it, with signals blocked.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@dataclass(frozen=True)
class _Outcome:
    """What a rank came to: a result, or a traceback and how likely it is no cause (0 to 2)."""

    rank: int
    value: Any
    severity: int | None = None


class Workers(launch.Workers):
    """Processes that run `fn(*args)`, one a rank; as a context manager it leaves none."""

    def __init__(
        self, n: int, fn: Callable[..., Any], args: tuple[Any, ...], **options: Any
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._temporary.name)
        (folder / "call.pickle").write_bytes(pickle.dumps((fn, args)))
        super().__init__(n, f"{__name__}:run_call", folder, {}, preload=_PRELOAD, **options)
        self.start()

    def kill(self, *ranks: int, signal_number: int = signal.SIGKILL) -> None:
        """Sends a signal to some ranks; to all if none is named."""
        self.send(signal_number, *ranks)

    def join(self, timeout_s: float = _PATIENCE_S) -> list[int | None]:
        """Waits until all have ended, and returns their exit codes.

        As torchrun does, it kills those who go on some seconds after another has failed: they
        may be waiting for it to join them. TimeoutError, and all killed, after `timeout_s`.
        """
        if not self._wait_for_all(timeout_s):
            running = [rank for rank, code in enumerate(self.exit_codes) if code is None]
            self.close()
            raise TimeoutError(f"ranks {running} did not end within {timeout_s:g} s")
        self.close()
        return self.exit_codes

    def results(self, timeout_s: float = _PATIENCE_S) -> list[Any]:
        """What the ranks returned; RemoteError with the causing traceback if one raised or died."""
        self._wait_for_all(timeout_s)
        outcomes = self.outcomes()
        failures = [outcome for outcome in outcomes.values() if outcome.severity is not None]
        if failures:
            worst = min(failures, key=lambda outcome: outcome.severity or 0)
            raise RemoteError(f"on rank {worst.rank}:\n{worst.value}")
        silent = sorted(set(range(len(self.pids))) - set(outcomes))
        if silent:
            self.show_stacks()
            raise TimeoutError(f"ranks {silent} returned nothing within {timeout_s:g} s")
        return [outcomes[rank].value for rank in sorted(outcomes)]

    def _wait_for_all(self, timeout_s: float) -> bool:
        """Until all have ended, or some seconds after one has failed; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        failed_deadline = math.inf
        while None in self.exit_codes:
            now = time.monotonic()
            if any(self.exit_codes):  # asked before the first wait: it may have failed already
                failed_deadline = min(failed_deadline, now + _GRACE_S)
            if now >= deadline:
                return False
            if now >= failed_deadline:
                break
            self.wait(min(deadline, failed_deadline) - now)
        return True

    def outcomes(self) -> dict[int, _Outcome]:
        """By rank, of those who left one or died."""
        found = {}
        for rank, code in enumerate(self.exit_codes):
            path = self.folder / f"rank-{rank}.pickle"
            if path.exists():
                found[rank] = pickle.loads(path.read_bytes())
            elif code is not None:
                found[rank] = _Outcome(rank, f"it died (exit code {code})", severity=1)
        return found

    def show_stacks(self) -> None:
        """Has the ranks and their loader processes write to stderr where they are."""
        for pid in self.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank = psutil.Process(pid)
                for process in (rank, *rank.children(recursive=True)):
                    process.send_signal(_SHOW_STACKS)
        time.sleep(0.5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._temporary.cleanup()


def start_processes(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> Workers:
    """Starts n processes that run `fn(comm, *args)`; `fn` is importable, results are picklable."""
    return Workers(n, _with_comm, (timeout_s, fn, args))


def run_processes(
    n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = _PATIENCE_S
) -> list[Any]:
    """Runs `fn(comm, *args)` in n processes and returns the results, by rank."""
    with start_processes(n, fn, *args, timeout_s=timeout_s) as workers:
        return workers.results(timeout_s)


def run_script(n: int, script: Path, folder: Path, timeout_s: float = _PATIENCE_S) -> list[str]:
    """Runs a script in a folder, warnings being errors, and returns what each process prints.

    Several processes are told what torchrun would tell them, a single one nothing.
    """
    with Workers(n, _run_script, (script, folder)) as workers:
        return workers.results(timeout_s)


def _run_script(script: Path, folder: Path) -> str:
    if read_launch().size == 1:
        forget_launch()
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


def run_call(folder: Path) -> int:
    """What each process runs."""
    faulthandler.register(_SHOW_STACKS)
    torch.set_num_threads(1)
    # As in a worker that was not forked itself: a loader's processes are forked.
    multiprocessing.set_start_method("fork", force=True)
    rank = read_launch().rank
    fn, args = pickle.loads((folder / "call.pickle").read_bytes())
    try:
        outcome = _Outcome(rank, fn(*args))
    except BaseException as error:
        severity = 2 if isinstance(error, PeerLostError) else 0
        outcome = _Outcome(rank, traceback.format_exc(), severity)
    # By value: torch would share tensors through this process, which is about to end.
    with replacing(folder / f"rank-{rank}.pickle") as draft:
        draft.write_bytes(pickle.dumps(outcome))
    return 0 if outcome.severity is None else 1


def wait_until(condition: Callable[[], object], timeout_s: float, log: Path | None = None) -> None:
    """Asks again and again; shows the end of a log, if there is one, where it takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        is_late = time.monotonic() > deadline_s
        assert not is_late, log.read_text()[-4000:] if log and log.exists() else "no log"
        time.sleep(0.1)


def names_in_dev_shm() -> set[str]:
    """What allstep could have left there; other tests at the same time come and go."""
    names = os.listdir("/dev/shm")
    return {name for name in names if not name.startswith(("sem.", "torch_", PREFIX))}
