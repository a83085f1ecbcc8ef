"""Where workers that a launcher has started find each other."""

import os
import stat
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from allstep.comm.agreement import digest
from allstep.comm.failures import translated
from allstep.env import Launch
from allstep.errors import CollectiveTimeoutError, UsageError

_POLL_S = 0.01


def rendezvous(launch: Launch, timeout_s: float, folder: Path | None = None) -> TCPStore:
    """A store that all workers of the launch share; rank 0 serves it.

    Args:
        launch: says who this worker is.
        timeout_s: how long to wait for the others.
        folder: for files, on one node; None for the system's folder of temporary files.

    Raises:
        UsageError: if the port of rank 0 is taken.
        CollectiveTimeoutError: if not all workers come within `timeout_s`.
    """
    if launch.master_addr is not None and launch.master_port is not None:
        return _connect(launch, launch.master_addr, launch.master_port, timeout_s)
    return _rendezvous_by_file(launch, timeout_s, folder or Path(tempfile.gettempdir()))


def _connect(launch: Launch, host: str, port: int, timeout_s: float) -> TCPStore:
    """Joins the store at a known address."""
    try:
        with translated("init", launch.rank, launch.size, timeout_s):
            return TCPStore(
                host,
                port,
                launch.size,
                launch.rank == 0,
                timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
    except RuntimeError as error:
        if "address already in use" in str(error).lower():
            raise UsageError(
                f"MASTER_PORT (={port}) is taken on {host}; set it to a free port on all workers."
            ) from error
        raise


def _rendezvous_by_file(launch: Launch, timeout_s: float, folder: Path) -> TCPStore:
    """[Note: rendezvous by file] mpirun tells no address. On one node rank 0 takes any free port
    and leaves its number in a folder that only this user can write to; it removes the file when
    all workers have come.
    """
    path = _private_folder(folder) / f"{digest(launch.job_id):016x}"
    if launch.rank != 0:
        port = _wait_for_port(path, launch, timeout_s)
        store = _connect(launch, "127.0.0.1", port, timeout_s)
        store.set(f"allstep/came/{launch.rank}", "")
        return store
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore("127.0.0.1", 0, launch.size, True, timeout, wait_for_workers=False)
    draft = path.with_suffix(".draft")
    draft.write_text(str(store.port))
    draft.replace(path)
    try:
        with translated("init", launch.rank, launch.size, timeout_s):
            for rank in range(1, launch.size):
                store.wait([f"allstep/came/{rank}"], timeout)
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
    return store


def _wait_for_port(path: Path, launch: Launch, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            return int(path.read_text())
        time.sleep(_POLL_S)
    raise CollectiveTimeoutError(
        f"`init` on rank {launch.rank} of {launch.size}: rank 0 did not come within "
        f"{timeout_s:g} s; see whether it failed, or raise `timeout_s`."
    )


def _private_folder(parent: Path) -> Path:
    """A folder for this user's rendezvous that nobody else can write to."""
    folder = parent / f"allstep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise UsageError(
            f"the folder {folder} is open to others; remove it, or set MASTER_ADDR and MASTER_PORT."
        )
    return folder
