"""A lock on a run's folder, so that only one training at a time writes there.

[Note: run lock] It is a POSIX record lock on `RUN/.lock`: the kernel releases it when the process
ends, however it ends, network file systems enforce it on other hosts, and loader processes, which
may outlive a killed worker for a moment, do not inherit it. The file's text only names the holder.
Closing any descriptor of the file releases the process's lock too, so `_held` is checked first.
A launcher holds `RUN/.launcher.lock` from before it writes the recipe until its workers have ended,
because workers that have not begun yet, or that regroup, hold nothing.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allstep.comm import Communicator
from allstep.errors import UsageError

_logger = logging.getLogger(__name__)
_FILE, _LAUNCHER_FILE = ".lock", ".launcher.lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_held: set[Path] = set()


@contextmanager
def run_lock(run_dir: Path, comm: Communicator, *, goes_on: bool = False) -> Iterator[bool]:
    """Holds a run's folder, on rank 0 for all; see [Note: run lock]. All workers call it.

    If the file system has no locks, a warning says so and the run continues.

    Args:
        run_dir: the run's folder; made if missing.
        comm: the workers that train.
        goes_on: whether this folder's training continues from memory: a present holder is then a
            worker that was left behind, which releases the lock before it does anything else.

    Yields:
        Whether this worker holds it.

    Raises:
        UsageError: on every worker, if another process trains there or it can't be written.
    """
    file = run_dir.resolve() / _FILE
    descriptor, problem = _acquire(run_dir, file) if comm.rank == 0 else (None, None)
    if goes_on:
        problem = None
    try:
        problem = comm.broadcast_object(problem)
        if problem is not None:
            raise UsageError(problem)
        yield descriptor is not None
    finally:
        _let_go(file, descriptor)


@contextmanager
def launcher_lock(run_dir: Path) -> Iterator[None]:
    """Holds a run's folder for a launcher's workers; see [Note: run lock].

    Raises:
        UsageError: if another launcher holds it, or it can't be written.
    """
    file = run_dir.resolve() / _LAUNCHER_FILE
    descriptor, problem = _acquire(run_dir, file)
    if problem is not None:
        raise UsageError(problem)
    try:
        yield
    finally:
        _let_go(file, descriptor)


def _let_go(file: Path, descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
        _held.discard(file)


def trainer_of(run_dir: Path) -> str | None:
    """The process that trains in a run's folder now, with its host; None if there is none."""
    folder = run_dir.resolve()
    return _holder(folder / _FILE) or _holder(folder / _LAUNCHER_FILE)


def launcher_has_ended(run_dir: Path) -> bool:
    """Whether it is known that the launcher of a run's workers has ended, however it did."""
    file = run_dir.resolve() / _LAUNCHER_FILE
    try:
        return file.exists() and _look(file) is None
    except OSError:  # no locks there
        return False


def _holder(file: Path) -> str | None:
    with contextlib.suppress(OSError):
        return _look(file)
    return None


def _look(file: Path) -> str | None:
    """The process that holds a lock; None if none does.

    Raises:
        OSError: if that can't be found out.
    """
    if file in _held:
        return _this_process()
    descriptor = os.open(file, os.O_RDONLY)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return _named_in(descriptor)
        raise
    finally:
        os.close(descriptor)
    return None


def _acquire(run_dir: Path, file: Path) -> tuple[int | None, str | None]:
    """A descriptor that holds the lock, or why there is none."""
    trainer = _holder(file)
    if trainer is not None:
        return None, taken_by(run_dir, trainer)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        return None, (
            f"`run_dir` (={run_dir}) can't be written ({error.strerror}); choose another folder."
        )
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:  # by one that was quicker
            trainer = _named_in(descriptor)
            os.close(descriptor)
            return None, taken_by(run_dir, trainer)
        _logger.warning(
            "%s can't be locked (%s): take care that no other process trains there",
            run_dir,
            error.strerror,
        )
    with contextlib.suppress(OSError):  # a full disk; the lock holds without its text
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _this_process().encode(), 0)
    _held.add(file)
    return descriptor, None


def taken_by(run_dir: Path, trainer: str) -> str:
    """The error message for a training in a folder that is in use."""
    return (
        f"`run_dir` (={run_dir}) is being trained by {trainer}: wait for its end, or end it with a"
        " checkpoint (Ctrl-C or SIGTERM), then resume it; a second run needs a folder of its own."
    )


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _named_in(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
