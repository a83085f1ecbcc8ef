"""Readings of a host's equipment and speed, for `allstep doctor`; without torch."""

import contextlib
import hashlib
import os
import resource
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from allstep.cli.probe_gpus import has_gpus, probe_gpus
from allstep.env import make_room

_SIDE = 192
_REPEATS = 7
_DISK_BYTES = 16 << 20
_SHARED = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")


def probe_machine(num_descriptors: int, port: int | None, folder: str) -> dict[str, Any]:
    """Readings of this host, as plain data; see `probe_limits` and `probe_gpus`."""
    found = probe_limits(num_descriptors, port, folder) | {"cores": measure_cores()}
    return found | (probe_gpus() if has_gpus() else {})


def probe_limits(num_descriptors: int, port: int | None, folder: str) -> dict[str, Any]:
    """The readings that take no time: all but those of cores and GPUs.

    Args:
        num_descriptors: open files and connections that a worker will need.
        port: that rank 0 shall listen on; None for any.
        folder: in which the run is written.
    """
    has_infiniband = any(_INFINIBAND.glob("*"))
    return {
        "name_address": _address_of_own_name(),
        "time_s": time.time(),
        "num_descriptors": make_room(num_descriptors),
        "stack_bytes": _soft_limit(resource.RLIMIT_STACK),
        "num_processes": _soft_limit(resource.RLIMIT_NPROC),
        "locked_bytes": _soft_limit(resource.RLIMIT_MEMLOCK) if has_infiniband else None,
        "shared_bytes": shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None,
        "is_port_taken": port is not None and is_port_taken(port),
        "disk_bytes_per_s": measure_disk(Path(folder)),
    }


def _address_of_own_name() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _soft_limit(kind: int) -> int | None:
    """A soft limit; None where there is none."""
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def is_port_taken(port: int) -> bool:
    """Whether another process listens on a port.

    >>> with socket.create_server(("", 0)) as server:
    ...     is_port_taken(server.getsockname()[1])
    True
    """
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return True
    return False


def measure_disk(folder: Path) -> float:
    """Bytes per second written to the disk of a folder; 0 if it can't be written."""
    path = folder / f".allstep-doctor-{os.getpid()}"
    start_s = time.monotonic()
    try:
        with path.open("wb") as file:
            file.write(bytes(_DISK_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return _DISK_BYTES / (time.monotonic() - start_s)


def measure_cores() -> dict[int, tuple[float, str]]:
    """Core -> the shortest time of a matrix product there, and a digest of the result."""
    before = os.sched_getaffinity(0)
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((_SIDE, _SIDE)) for _ in range(2))
    found = {}
    try:
        for core in sorted(before):
            os.sched_setaffinity(0, {core})
            times_s, digests = [], set()
            for _ in range(_REPEATS):
                start_s = time.thread_time()
                # No library of its own threads: each core does the same operations.
                product = np.einsum("ij,jk->ik", left, right)
                times_s.append(time.thread_time() - start_s)
                digests.add(hashlib.sha256(product.tobytes()).hexdigest()[:12])
            found[core] = (min(times_s), "/".join(sorted(digests)))
    finally:
        os.sched_setaffinity(0, before)
    return found
