"""Which of how many workers a process is."""

import zlib
from dataclasses import dataclass

_PORTS = range(20_000, 30_000)  # below the ports that systems hand out by themselves


@dataclass(frozen=True)
class Launch:
    """Which of how many workers this process is, and where they meet.

    Attributes:
        launcher: who started this process: "torchrun" (or the same variables by hand), "slurm",
            "openmpi", "mpich" (and Intel MPI), "mvapich2", "jsrun", "flux", "horovodrun", "none".
        rank, size: number of this worker and of all.
        local_rank, local_size: the same on this node.
        node_rank, num_nodes: number of this node and of all.
        master_addr, master_port: where rank 0 listens; None if no one said (one node).
        job_id: unlike for jobs that run at the same time.
        has_store: whether the launcher serves the store at that address, in rank 0's place.
        attempt: how often the launcher has started the workers again.
        min_workers: where a launcher lets workers go on without those that are lost: with how few;
            None where one that fails ends all.
        joins: whether this worker comes to a run that others have begun.
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
    """A port that all workers of a job derive alike, and other jobs hardly."""
    return _PORTS[zlib.crc32(job_id.encode()) % len(_PORTS)]
