"""The doctor's readings of hosts whose workers have already connected."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from allstep.cli.doctor_faults import Finding, descriptors_needed, find_faults, port_taken
from allstep.cli.host import facts_of
from allstep.cli.probe_machine import is_port_taken, probe_limits
from allstep.comm import Communicator
from allstep.env import read_launch
from allstep.errors import UsageError


def read_together(
    comm: Communicator, read: Callable[[], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Host -> readings for `find_faults`, the same on every rank. Collective.

    Args:
        comm: all workers; one of each host reads.
        read: what is added to `facts_of`, and to the difference of its clock to rank 0's.
    """
    times_s = []
    for _ in range(3):
        comm.barrier()
        times_s.append(time.time())
    name = os.uname().nodename + (f" (rank {comm.rank})" if comm.size > 1 else "")
    own = facts_of([], []) | read() if comm.local_rank == 0 else None
    every = comm.all_gather_object((name, own, times_s))
    found = {}
    for host, reading, there_s in every:
        if reading is not None:
            pairs = zip(there_s, every[0][2], strict=True)
            skew_s = min(abs(there - here) for there, here in pairs)
            found[host] = reading | {"skew_s": skew_s}
    return found


def refusal(comm: Communicator, folder: Path, num_workers: int) -> str:
    """Reasons not to train: the findings of `allstep doctor` that have a cure. Collective.

    What takes no time is read: limits, shared memory, versions, clocks, the disk of a folder.

    Args:
        comm: all workers that have been started.
        folder: in which the run is written.
        num_workers: that will train together.

    Returns:
        Each fault, its host and the cure, the same on all ranks; empty if there is none.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())

    def read() -> dict[str, Any]:
        return probe_limits(descriptors_needed(num_workers), port=None, folder=str(existing))

    found = find_faults(read_together(comm, read), {}, num_workers)
    return _refusal([finding for finding in found if finding.cure])


def check_port() -> None:
    """Raises UsageError if another program has the port for rank 0's store."""
    launch = read_launch()
    port = launch.master_port
    if launch.rank == 0 and not launch.has_store and port is not None and is_port_taken(port):
        raise UsageError(_refusal([port_taken(launch.master_addr or "this host")]))


def _refusal(found: Sequence[Finding]) -> str:
    if not found:
        return ""
    lines = [f"  {finding}" for finding in found]
    head = (
        "`doctor` (=quick) has found what would harm the training; leave it out to train all the"
        " same:"
    )
    return "\n".join([head, *lines])
