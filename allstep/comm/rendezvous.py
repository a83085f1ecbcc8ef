"""The store through which workers that a launcher has started find each other."""

import logging
import math
import os
import re
import socket
import stat
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from allstep.comm.agreement import digest
from allstep.comm.gather_places import NOTICE_S
from allstep.env import Launch, address_towards, is_loopback
from allstep.errors import CollectiveTimeoutError, UsageError
from allstep.files import write_whole

_logger = logging.getLogger("allstep")
_PORT = "allstep/port"  # key of the port of the workers' store
_POLL_S = 0.01
_RETRY_S = 0.1
_RESOLVE_S = 10.0  # time for a name server to learn a new host's name


class Rendezvous:
    """Connects to a store that all workers of a launch share; rank 0 or the launcher serves it.

    [Note: one store] A process keeps the store of its launch until it ends: otherwise the first
    worker in the next `init` would connect to the store that rank 0 is about to close. So at
    MASTER_PORT rank 0 serves a separate store, which only holds the port of the real one: torch may
    serve a store of its own at MASTER_PORT later, and must find no keys of allstep there.

    Args:
        launch: this worker's launch.
        timeout_s: how long to wait for the others.
        folder: folder for the file of a rendezvous on one node; None for the system's temporary
            folder.
        notice_s: time after which a warning says, once, that the store can't be reached.

    Attributes:
        doing: what it waits for, in words; another thread may read it.
        deadline_s: the deadline, by `time.monotonic()`.
    """

    def __init__(
        self,
        launch: Launch,
        timeout_s: float,
        folder: Path | None = None,
        notice_s: float = NOTICE_S,
    ) -> None:
        self._launch = launch
        self._timeout_s = timeout_s
        self._folder = folder or Path(tempfile.gettempdir())
        self._notice_s = notice_s
        self._file: Path | None = None
        self._at_master_port: TCPStore | None = None
        self.doing = "it had not begun"
        self.deadline_s = time.monotonic() + timeout_s

    def connect(self) -> TCPStore:
        """Connects to the store.

        Raises:
            UsageError: if the port of rank 0 is taken, or its host's name is unknown.
            CollectiveTimeoutError: if rank 0 does not listen within `timeout_s`.
        """
        launch = self._launch
        if launch.master_addr is None or launch.master_port is None:
            return self._connect_by_file()
        if launch.has_store:
            return self._join(launch.master_addr, launch.master_port)
        if launch.rank == 0:
            self._at_master_port = self._serve(launch.master_addr, launch.master_port)
            store = self._serve(launch.master_addr, 0)
            self._at_master_port.set(_PORT, str(store.port))
            return store
        at_master_port = self._join(launch.master_addr, launch.master_port)
        try:
            port = int(at_master_port.get(_PORT))
        except RuntimeError as error:
            raise self.late() from error
        return self._join(launch.master_addr, port)

    def late(self) -> CollectiveTimeoutError:
        """The error for a worker whose time is over."""
        launch = self._launch
        return CollectiveTimeoutError(
            f"`init` on rank {launch.rank} of {launch.size} did not finish within "
            f"{self._timeout_s:g} s: {self.doing}."
        )

    def _serve(self, host: str, port: int) -> TCPStore:
        self._resolve(host, port)
        self.doing = (
            f"rank 0 can't reach itself at {host}:{port}; set MASTER_ADDR to an address of its"
            f" host, {socket.gethostname()}, or start rank 0 on the host that has this address"
        )
        try:
            return self._store(host, port, is_server=True)
        except RuntimeError as error:
            found = re.search(r"failed to listen .*message: (.*)", str(error))
            if found is None:
                raise self.late() from error
            raise UsageError(
                f"MASTER_PORT (={port}) can't be listened on by rank 0 on {socket.gethostname()}: "
                f"{found[1].strip(' .')}; set it to a free port on all workers."
            ) from error

    def _join(self, host: str, port: int) -> TCPStore:
        """Connects to the store at a known address, as soon as one listens there."""
        self._resolve(host, port)
        served = "the launcher's store" if self._launch.has_store else "rank 0"
        notice_at_s = time.monotonic() + self._notice_s
        while True:
            left_s = self.deadline_s - time.monotonic()
            if left_s <= 0:
                raise self.late()
            try:
                socket.create_connection((host, port), min(left_s, self._notice_s)).close()
                break
            except OSError as error:
                self.doing = (
                    f"{served} can't be reached at {host}:{port} ({error.strerror or error}); see "
                    "whether it failed, and whether MASTER_ADDR and MASTER_PORT are its address"
                )
                self._refuse_loopback(host, port, error)
                if time.monotonic() >= notice_at_s:
                    notice_at_s = math.inf
                    rank = self._launch.rank
                    _logger.warning("`init` on rank %d still waits: %s", rank, self.doing)
            time.sleep(_RETRY_S)
        self.doing = (
            f"{host}:{port} accepts connections but does not answer as {served}: it was stopped, "
            "or another program has that port. Set MASTER_PORT to another one on all workers, or "
            "look at that process"
        )
        try:
            return self._store(host, port, is_server=False)
        except RuntimeError as error:
            raise self.late() from error

    def _refuse_loopback(self, host: str, port: int, error: OSError) -> None:
        """Refuses a loopback address on a node other than that of the launcher's store."""
        launch = self._launch
        if not launch.has_store or launch.node_rank == 0:
            return
        try:
            own = address_towards(host, port)
        except OSError:  # no route, or not yet
            return
        if is_loopback(own):
            raise UsageError(
                f"MASTER_ADDR (={host!r}) is {own} on {socket.gethostname()}, its own loopback "
                f"interface, but rank 0 is on another of {launch.num_nodes} nodes "
                f"({error.strerror}). Start torchrun on the first node with --local-addr ADDRESS, "
                "one that the other nodes reach, or on all with --master-addr ADDRESS."
            ) from error

    def _store(self, host: str, port: int, *, is_server: bool) -> TCPStore:
        return TCPStore(
            host,
            port,
            self._launch.size,
            is_server,
            timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            multi_tenant=is_server and port != 0,  # torch may serve on the same port
        )

    def _resolve(self, host: str, port: int) -> None:
        """Waits until the host's name can be resolved."""
        deadline_s = min(self.deadline_s, time.monotonic() + _RESOLVE_S)
        self.doing = f"nobody says what address {host!r} has; set MASTER_ADDR to an address"
        while True:
            try:
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                return
            except UnicodeError as error:  # not a valid name, such as .alpha
                raise _unknown(host, "no name has this form") from error
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise _unknown(host, error.strerror) from error
            time.sleep(_RETRY_S)

    def _connect_by_file(self) -> TCPStore:
        """Connects through a file that holds the port.

        [Note: rendezvous by file] mpirun gives workers no address. On one node rank 0 takes any
        free port and writes its number to a folder that only this user can write to; it removes the
        file when all workers have come.
        """
        path = _private_folder(self._folder) / f"{digest(self._launch.job_id):016x}"
        if self._launch.rank != 0:
            return self._join("127.0.0.1", self._wait_for_port(path))
        store = self._serve("127.0.0.1", 0)
        write_whole(path, str(store.port))
        self._file = path
        return store

    def _wait_for_port(self, path: Path) -> int:
        self.doing = (
            "rank 0 did not come; see whether it failed or, if it is on another machine, set "
            "MASTER_ADDR and MASTER_PORT"
        )
        while time.monotonic() < self.deadline_s:
            with suppress(FileNotFoundError):
                return int(path.read_text())
            time.sleep(_POLL_S)
        raise self.late()

    def close(self) -> None:
        """Removes the file of a rendezvous on one node; all have come, or none waits any more."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def leave_master_port(self) -> None:
        """Drops the store at MASTER_PORT, kept so far to give surplus workers an error."""
        self._at_master_port = None


def _unknown(host: str, reason: str | None) -> UsageError:
    return UsageError(
        f"MASTER_ADDR (={host!r}), where rank 0 should listen, is no host that "
        f"{socket.gethostname()} knows ({reason}); set it to a name or an address that all workers "
        "know."
    )


def _private_folder(parent: Path) -> Path:
    """A folder for this user's rendezvous files that no other user can write to."""
    folder = parent / f"allstep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise UsageError(
            f"the folder {folder} is open to others; remove it, or set MASTER_ADDR and MASTER_PORT."
        )
    return folder
