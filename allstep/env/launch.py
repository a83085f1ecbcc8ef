"""A process's rank, the number of workers, and where they meet."""

import zlib
from dataclasses import dataclass

_PORTS = range(20_000, 30_000)  # below the ephemeral ports


@dataclass(frozen=True)
class Launch:
    """This process's rank, the number of workers, and the address where they meet.

    Attributes:
        launcher: what started this process: "torchrun" (or the same variables set by hand),
            "slurm", "openmpi", "mpich" (and Intel MPI), "mvapich2", "jsrun", "flux", "horovodrun",
            "none".
        rank, size: this worker's rank, and the number of workers.
        local_rank, local_size: the same within this node.
        node_rank, num_nodes: this node's rank, and the number of nodes.
        master_addr, master_port: where rank 0 listens; None if unknown (a single node).
        job_id: differs between jobs that run at the same time.
        has_store: whether the launcher, instead of rank 0, serves the store at that address.
        attempt: number of times that the launcher has restarted the workers.
        min_workers: the least number of workers that go on when others are lost; None if one
            worker's failure ends all.
        joins: whether this worker joins a run that others have begun.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    master_addr: str | None
    master_port: int | None
    job_id: str
    has_store: bool = False
    attempt: int = 0
    min_workers: int | None = None
    joins: bool = False


def port_of(job_id: str) -> int:
    """A port that all workers of a job derive from its id; other jobs rarely derive the same."""
    return _PORTS[zlib.crc32(job_id.encode()) % len(_PORTS)]
