"""Runs workers by this command's own launcher, another launcher, or in this process."""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from allstep.cli.exits import StoreAddress
from allstep.cli.worker import find_function, read_call, read_result, share_cores, write_result
from allstep.comm import Communicator
from allstep.device import HIDE_ACCELERATORS, num_devices
from allstep.env import num_cores, read_launch
from allstep.errors import UsageError, check_integer
from allstep.train import run_worker

# What each worker does: `body(comm, **arguments)`, all of them plain data; what it returns is
# plain, too, and the exit code if it is an int.
Body = Callable[..., Any]


def num_workers_to_start(requested: int | None) -> int | None:
    """The number of workers that this process must start; None under a launcher."""
    launch = read_launch()
    if launch.launcher != "none":
        if requested not in (None, launch.size):
            raise UsageError(
                f"`workers` (={requested}) contradicts {launch.launcher}, which started"
                f" {launch.size}: leave `--workers` out."
            )
        return None
    num_gpus = num_devices()
    if requested is None:
        return max(1, num_gpus)
    check_integer("workers", requested)
    if num_gpus and requested > num_gpus:
        raise UsageError(
            f"`workers` (={requested}) exceeds this machine's GPUs ({num_gpus}): start at most"
            f" {num_gpus}, or {HIDE_ACCELERATORS}."
        )
    if not num_gpus and requested > num_cores():
        print(
            f"warning: `workers` (={requested}) exceeds this machine's cores ({num_cores()}): they"
            f" take turns, and are no faster than {num_cores()}.",
            file=sys.stderr,
        )
    return requested


def check_min_workers(min_workers: int, num_workers: int) -> None:
    """Raises UsageError if `min_workers` is invalid for the number of workers."""
    check_integer("workers", num_workers)
    check_integer("min_workers", min_workers)
    if min_workers > num_workers:
        raise UsageError(
            f"`min_workers` (={min_workers}) exceeds `workers` (={num_workers}): the run would end"
            " at once."
        )


def run_on_workers(num_workers: int | None, body: Body, **arguments: Any) -> int:
    """Runs a body on workers of this machine, or as one of a launcher's; returns the exit code.

    Args:
        num_workers: from `num_workers_to_start`; one runs in this process.
        body: a function of a module.
        arguments: of the body, as plain data.
    """
    if num_workers is None or num_workers == 1:
        return run_here(partial(body, **arguments))
    return ask_workers(num_workers, body, **arguments)[0]


def ask_workers(
    num_workers: int,
    body: Body,
    *,
    run_dir: Path | None = None,
    min_workers: int | None = None,
    joins: StoreAddress | None = None,
    store: tuple[str, int] | None = None,
    **arguments: Any,
) -> tuple[int, Any]:
    """Runs a body in new processes; returns the exit code and rank 0's result.

    Args:
        num_workers: how many.
        body: a function of a module.
        run_dir: where to leave how they ended.
        min_workers, joins, store: as for `Workers`.
        arguments: of the body, as plain data.
    """
    from allstep.cli.launch import Workers, launch_workers

    with tempfile.TemporaryDirectory(prefix="allstep-") as name:
        call = call_of(Path(name), body, arguments)
        workers = Workers(num_workers, *call, min_workers=min_workers, joins=joins, store=store)
        return launch_workers(workers, run_dir), read_result(workers.folder)


def call_of(folder: Path, body: Body, arguments: dict[str, Any]) -> tuple[str, Path, Any]:
    """The arguments of `Workers` with which each worker runs a body."""
    name = f"{body.__module__}:{body.__qualname__}"
    return f"{__name__}:run_body", folder, {"body": name, "arguments": arguments}


def run_body(folder: Path) -> int:
    """Runs the body that a call names as one of the workers; started by `allstep worker`."""
    call = read_call(folder)
    body = find_function(call.arguments["body"])

    def run(comm: Communicator) -> Any:
        result = body(comm, **call.arguments["arguments"])
        if comm.rank == 0:
            write_result(folder, result)
        return result

    return run_here(run, call.launcher_pid)


def run_here(
    body: Callable[[Communicator], Any],
    launcher_pid: int | None = None,
    advice: Callable[[], str] | None = None,
) -> int:
    """Runs a body as a worker in this process; returns its exit code. See `run_worker`."""

    def run(comm: Communicator) -> int:
        share_cores(comm.local_size)
        code = body(comm)
        return code if isinstance(code, int) else 0

    return run_worker(run, launcher_pid=launcher_pid, advice=advice)


@contextlib.contextmanager
def speaking_once() -> Iterator[None]:
    """Suppresses output inside on all ranks but 0, since all would print the same."""
    with contextlib.ExitStack() as stack:
        if read_launch().rank > 0:
            nowhere = io.StringIO()
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield
