"""A launcher's records in the run's folder: the store's address and the workers' ends."""

import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from allstep.cli.output_files import writing_errors
from allstep.comm import WorkerState, state_folder
from allstep.env import is_loopback, own_addresses
from allstep.errors import UsageError
from allstep.files import read_json, write_json
from allstep.train import launcher_has_ended

_CONNECT_S = 5.0


def signal_name(number: int) -> str:
    """A signal's usual name; real-time signals may have none.

    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Exits:
    """The ends of a launcher's workers.

    Ranks are those with which the workers began; others may have gone on without them.

    Attributes:
        codes: exit codes by rank, negative if a signal ended it.
        first: the rank that failed on its own account.
        killed: ranks that the launcher killed, for they had not ended long after others failed.
        pids: process ids by rank.
    """

    codes: Sequence[int | None]
    first: int
    killed: Sequence[int]
    pids: Sequence[int]

    def rank_of(self, state: WorkerState) -> int | None:
        """The first rank of a state's worker; None if another launcher started it."""
        return self.pids.index(state.pid) if state.pid in self.pids else None


def read_exits(run_dir: Path) -> Exits | None:
    """The record of a run's launcher; None if there was none, or all workers ended well."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Exits(**read_json(_file(run_dir)))
    return None


def write_exits(run_dir: Path, exits: Exits) -> None:
    """Writes the record for `allstep why`; does nothing on a full disk."""
    with contextlib.suppress(OSError):
        _file(run_dir).parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(run_dir), asdict(exits))


def forget_exits(run_dir: Path | None) -> None:
    """Deletes the record of an earlier launcher of the run."""
    if run_dir is not None:
        with contextlib.suppress(OSError):
            for file in (_file(run_dir), _store_file(run_dir)):
                file.unlink(missing_ok=True)


def outward_addresses() -> list[str]:
    """Addresses of this host by which others may reach it."""
    return [address for _, address in own_addresses() if not is_loopback(address)]


class StoreAddress(NamedTuple):
    """The address of the store through which workers of a run connect.

    Attributes:
        host, port: of the store.
        job_id: of the run in it.
    """

    host: str
    port: int
    job_id: str


@dataclass(frozen=True, kw_only=True)
class StoreRecord:
    """The description of a run for workers that join.

    Attributes:
        port: of its store.
        job_id: of the run in it.
        min_workers: with fewer the run ends.
        host: where the store is.
        addresses: by which other hosts may reach it.
        is_apart: whether `allstep store` serves it, and not the launcher.
    """

    port: int
    job_id: str
    min_workers: int
    host: str = field(default_factory=socket.gethostname)
    addresses: Sequence[str] = field(default_factory=outward_addresses)
    is_apart: bool = False

    def reachable_address(self) -> StoreAddress:
        """The first of the store's addresses that answers this host.

        Raises:
            UsageError: if it answers at none.
        """
        is_here = self.host == socket.gethostname()
        addresses = ["127.0.0.1"] * is_here + list(self.addresses)
        for address in addresses:
            with contextlib.suppress(OSError):
                socket.create_connection((address, self.port), _CONNECT_S).close()
                return StoreAddress(address, self.port, self.job_id)
        server = "store" if self.is_apart else "launcher"
        raise UsageError(
            f"The {server} on {self.host} can't be reached from {socket.gethostname()}: nothing"
            f" answers at port {self.port} of {', '.join(addresses) or 'any address'}. Let this"
            " host connect to it, or start the workers there."
        )


@contextlib.contextmanager
def keeping_store(run_dir: Path, record: StoreRecord) -> Iterator[None]:
    """Keeps the record in the run's folder while the launcher runs.

    Raises:
        UsageError: if the folder can't be written.
    """
    file = _store_file(run_dir)
    with writing_errors(f"`run_dir` (={run_dir})"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(record))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def read_store(run_dir: Path) -> StoreRecord:
    """The record of the run that is being trained in a folder.

    Raises:
        UsageError: if none is, or if it takes no workers. A launcher that was killed has left its
            record, but not its lock; where it does not serve the store, others may go on.
    """
    try:
        record = StoreRecord(**read_json(_store_file(run_dir)))
    except (OSError, ValueError, TypeError):
        raise UsageError(
            f"`run` (={run_dir}) takes no workers now: it has ended, or it was started without"
            " `--elastic`."
        ) from None
    if not record.is_apart and launcher_has_ended(run_dir):
        raise UsageError(
            f"`run` (={run_dir}) takes no workers now: its launcher on {record.host} was killed;"
            " `allstep why` says how to continue the run."
        )
    return record


def _store_file(run_dir: Path) -> Path:
    return state_folder(run_dir) / "store.json"


def _file(run_dir: Path) -> Path:
    return state_folder(run_dir) / "launcher.json"
