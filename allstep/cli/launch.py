"""Starts local workers under torchrun's elastic agent and says what became of them."""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from allstep.train.failures import FAILED, PEER_LOST
from allstep.train.stop import SIGNALS

__all__ = ["launch_workers"]

# After Ctrl-C or SIGTERM workers finish their step and write a checkpoint; a second signal
# ends them at once, so this only bounds a wait that nobody watches.
_SHUTDOWN_TIMEOUT_S = 600


def launch_workers(num_workers: int, command: Sequence[str]) -> int:
    """Runs `python *command` as `num_workers` local workers until all have ended.

    They begin with SIGINT and SIGTERM blocked, and unblock them when they can answer.

    Args:
        num_workers: processes to start on this machine.
        command: arguments of the Python interpreter.

    Returns:
        0; the exit code of the worker that failed first; 128 + the signal that this process
        got or that killed the workers after a checkpoint.

    Raises:
        SystemExit: on a signal before the workers run, or after they have ended.
    """
    _silence_elastic()
    with (
        _unwound_by_signals(),
        tempfile.TemporaryDirectory(prefix="allstep-") as log_dir,
        _signals_blocked_for_children(),
    ):
        launch = elastic_launch(_config(num_workers, log_dir), sys.executable)
        try:
            launch(*command)
        except ChildFailedError as error:
            _end_groups(error.failures.values())
            return _explain(error.failures)
        except SignalException as error:
            return 128 + error.sigval
    return 0


@contextlib.contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """Signals end this process by way of what it has to tidy up.

    The agent brings its own handlers, and leaves them behind.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_blocked_for_children() -> Iterator[None]:
    """A signal that the agent passes on to a worker waits until that worker listens.

    An interpreter that is only starting would answer Ctrl-C with a traceback. A process
    inherits what its parent's thread has blocked; meanwhile another thread takes the signals
    of this process, and Python handles them in this one as ever.
    """
    is_over = threading.Event()
    taker = threading.Thread(target=is_over.wait, name="allstep takes signals")
    taker.start()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        is_over.set()
        taker.join()


def _silence_elastic() -> None:
    """Drops the agent's log lines: the failing worker has told the user what happened."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


def _config(num_workers: int, log_dir: str) -> LaunchConfig:
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    newer: dict[str, Any] = {
        "shutdown_timeout": _SHUTDOWN_TIMEOUT_S,
        "signals_to_handle": "SIGTERM,SIGINT",  # nohup's ignored SIGHUP stays ignored
    }
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(log_dir=log_dir),  # holds the workers' error files
        **{name: value for name, value in newer.items() if name in known},
    )


def _end_groups(failures: Iterable[ProcessFailure]) -> None:
    """Kills the loaders of workers that had no time to do it themselves.

    The agent starts each worker in a session, and so in a process group, of its own.
    """
    for failure in failures:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(failure.pid, signal.SIGKILL)


def _explain(failures: Mapping[int, ProcessFailure]) -> int:
    """Prints what no worker could say itself; returns the exit code of the run."""
    rank, failure = _root_cause(failures)
    code = failure.exitcode
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        print(f"error: worker {rank} was killed by {name}{hint}", file=sys.stderr)
        return FAILED
    return FAILED if code == PEER_LOST else code


def _root_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The worker that failed on its own account: it reported, or was killed, or came first."""

    def order(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        has_reported = os.path.isfile(failure.error_file)
        return (not has_reported, failure.exitcode == PEER_LOST, failure.timestamp)

    rank = min(failures, key=order)
    return rank, failures[rank]
