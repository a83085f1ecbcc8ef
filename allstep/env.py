"""What the launcher says in the environment; the only room that touches os.environ.

torchrun wins over mpirun, mpirun over srun (which starts mpirun's own helpers), and a process
that none of them started is a single process.
"""

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from allstep.errors import UsageError

_PORTS = range(20_000, 30_000)  # below the ports that systems hand out by themselves
_OPENMPI_JOB = (  # each unlike for unlike jobs of a machine; the first are there always
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_MCA_orte_precondition_transports",
)
# What torchrun, mpirun (Open MPI, MPICH, MVAPICH) and srun tell a worker of itself and its peers.
_OF_LAUNCHERS = re.compile(
    r"((LOCAL|GROUP|ROLE|NODE)_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)|(TORCHELASTIC|OMPI|PMIX|PMI|PRTE|HYDI|MV2_COMM_WORLD)_\w+"
    r"|SLURM_(STEP\w+|PROCID|LOCALID|NODEID|GTIDS|NPROCS|NTASKS\w*|TASKS_PER_NODE)"
)


@dataclass(frozen=True)
class Launch:
    """Which of how many workers this process is, and where they meet.

    Attributes:
        launcher: who started this process.
        rank, size: number of this worker and of all.
        local_rank, local_size: the same on this node.
        node_rank, num_nodes: number of this node and of all.
        master_addr, master_port: where rank 0 listens; None if no one said (one node).
        job_id: unlike for jobs that run at the same time.
    """

    launcher: Literal["torchrun", "slurm", "openmpi", "none"]
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    master_addr: str | None
    master_port: int | None
    job_id: str


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Reads who started this process.

    Args:
        environ: variables to read; the process's own if None.

    Raises:
        UsageError: if the variables contradict each other.

    >>> read_launch({}).launcher
    'none'
    >>> read_launch({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).rank
    1
    """
    variables = _Variables(os.environ if environ is None else environ)
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _read_torchrun(variables)
    if variables.positive("OMPI_COMM_WORLD_SIZE", 1) > 1:
        return _read_openmpi(variables)
    if _is_slurm_step(variables):
        return _read_slurm(variables)
    return Launch("none", 0, 1, 0, 1, 0, 1, None, None, "none")


def forget_launch(environ: MutableMapping[str, str] | None = None) -> None:
    """Makes a launcher's worker a single process, and so all that it starts.

    Args:
        environ: variables to change; the process's own if None.

    >>> variables = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_JOB_ID": "7"}
    >>> forget_launch(variables)
    >>> variables
    {'SLURM_JOB_ID': '7'}
    """
    variables = os.environ if environ is None else environ
    for name in list(variables):
        if _OF_LAUNCHERS.fullmatch(name):
            del variables[name]


def read_error_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where torchrun's agent looks for what made this worker fail; None without an agent."""
    path = _Variables(os.environ if environ is None else environ).text("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path is not None else None


def environment_of_worker(
    rank: int, size: int, store_port: int, job_id: str, error_file: Path
) -> dict[str, str]:
    """This process's variables, and what torchrun would tell a worker on this machine.

    Args:
        rank, size: number of the worker and of all.
        store_port: where this machine serves the store in which the workers meet.
        job_id: unlike for jobs that run at the same time.
        error_file: where the worker reports its failure.
    """
    environ = dict(os.environ)
    forget_launch(environ)
    return environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


def set_environment(environ: Mapping[str, str]) -> None:
    """Puts other variables in place of all of this process's own."""
    os.environ.clear()
    os.environ.update(environ)


def read_num_threads(environ: Mapping[str, str] | None = None) -> int | None:
    """The threads that the user (or torchrun) wants in each worker; None if no one said.

    >>> read_num_threads({"OMP_NUM_THREADS": "4"})
    4
    """
    variables = _Variables(os.environ if environ is None else environ)
    return variables.positive("OMP_NUM_THREADS") if "OMP_NUM_THREADS" in variables else None


class _Variables:
    """Environment variables, read with checks."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __contains__(self, name: str) -> bool:
        return bool(self._environ.get(name))  # set to nothing counts as not set

    def text(self, name: str) -> str | None:
        return self._environ.get(name) or None

    def first_set(self, name: str, fallback: str) -> str:
        """The first of two names that is set, else the second."""
        return name if name in self else fallback

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number, at least 0."""
        text = self.text(name)
        if text is None:
            if default is None:
                raise UsageError(f"{name} is not set, but its launcher's other variables are.")
            return default
        if not re.fullmatch(r"\d+", text.strip()):
            raise UsageError(f"{name} (={text!r}) must be a whole number; set it or unset it.")
        return int(text)

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number, at least 1."""
        value = self.number(name, default)
        if value < 1:
            raise UsageError(f"{name} (={value}) must be at least 1.")
        return value

    def place(self, rank_name: str, size_name: str, rank: int, size: int) -> tuple[int, int]:
        """A rank and a size that fit; the defaults where neither is set."""
        if rank_name not in self and size_name not in self:
            return rank, size
        rank, size = self.number(rank_name, rank), self.positive(size_name, size)
        if rank >= size:
            raise UsageError(
                f"{rank_name} (={rank}) must be below {size_name} (={size}); set both as the "
                "launcher would, or unset them."
            )
        return rank, size

    def local_place(self, prefix: str, rank: int, size: int) -> tuple[int, int]:
        """This node's rank and size, the whole's where neither is set."""
        name, of = f"{prefix}LOCAL_SIZE", f"{prefix}SIZE"
        if not prefix:
            name, of = "LOCAL_WORLD_SIZE", "WORLD_SIZE"
        local_rank, local_size = self.place(f"{prefix}LOCAL_RANK", name, rank, size)
        if local_size > size:
            raise UsageError(
                f"{name} (={local_size}) must not be above {of} (={size}); set both as the "
                f"launcher would, or unset {name}."
            )
        return local_rank, local_size

    def master(self) -> tuple[str | None, int | None]:
        port = self.number("MASTER_PORT") if "MASTER_PORT" in self else None
        if port is not None and not 0 < port < 65_536:
            raise UsageError(f"MASTER_PORT (={port}) must be a port: 1 to 65535.")
        return self.text("MASTER_ADDR"), port


def _read_torchrun(variables: _Variables) -> Launch:
    """torchrun's variables, or the same set by hand."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in variables and other not in variables:
            raise UsageError(
                f"{name} (={variables.text(name)}) is set, but {other} is not; set both as "
                f"torchrun does, or unset {name}."
            )
    rank, size = variables.place("RANK", "WORLD_SIZE", 0, 1)
    if "TORCHELASTIC_RUN_ID" not in variables:
        _check_no_other_launcher(variables, rank, size)
    local_rank, local_size = variables.local_place("", rank, size)
    node_rank, num_nodes = variables.place(
        "GROUP_RANK", "GROUP_WORLD_SIZE", rank // local_size, -(-size // local_size)
    )
    address, port = variables.master()
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        if value is None:
            raise UsageError(
                f"RANK (={rank}) and WORLD_SIZE (={size}) are set, but {name} is not; set it to "
                "where rank 0 listens, or start with torchrun."
            )
    job_id = variables.text("TORCHELASTIC_RUN_ID") or "torchrun"
    return Launch(
        "torchrun", rank, size, local_rank, local_size, node_rank, num_nodes, address, port, job_id
    )


def _check_no_other_launcher(variables: _Variables, rank: int, size: int) -> None:
    """RANK and WORLD_SIZE set by hand must say what mpirun or srun say."""
    if variables.positive("OMPI_COMM_WORLD_SIZE", 1) > 1:
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    elif _is_slurm_step(variables):
        names = ("SLURM_PROCID", variables.first_set("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    else:
        return
    theirs = variables.number(names[0]), variables.number(names[1])
    if (rank, size) != theirs:
        raise UsageError(
            f"RANK (={rank}) and WORLD_SIZE (={size}) contradict {names[0]} (={theirs[0]}) and "
            f"{names[1]} (={theirs[1]}); unset RANK and WORLD_SIZE."
        )


def _read_openmpi(variables: _Variables) -> Launch:
    """The variables of Open MPI's mpirun."""
    rank, size = variables.place("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", 0, 1)
    local_rank, local_size = variables.local_place("OMPI_COMM_WORLD_", rank, size)
    job_id = "/".join(filter(None, map(variables.text, _OPENMPI_JOB))) or "openmpi"
    address, port = variables.master()
    if address is None and local_size < size:
        raise UsageError(
            f"mpirun started OMPI_COMM_WORLD_SIZE (={size}) workers, "
            f"OMPI_COMM_WORLD_LOCAL_SIZE (={local_size}) of them here, and does not say where "
            "rank 0 is; tell it: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500 ..."
        )
    port = None if address is None else port or _port_of(job_id)
    # A guess: mpirun does not number nodes (its NODE_RANK is a local rank).
    node_rank, num_nodes = rank // local_size, -(-size // local_size)
    return Launch(
        "openmpi", rank, size, local_rank, local_size, node_rank, num_nodes, address, port, job_id
    )


def _is_slurm_step(variables: _Variables) -> bool:
    """Did srun start this process together with others? A batch script is not."""
    has_step = "SLURM_STEP_ID" in variables or "SLURM_STEPID" in variables
    size = variables.number(variables.first_set("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), 1)
    return "SLURM_PROCID" in variables and has_step and size > 1


def _read_slurm(variables: _Variables) -> Launch:
    """The variables of Slurm's srun."""
    size_name = variables.first_set("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank, size = variables.place("SLURM_PROCID", size_name, 0, 1)
    hosts_name = variables.first_set("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    tasks_name = variables.first_set("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    host = first_host(variables.text(hosts_name) or "", hosts_name)
    tasks = expand_counts(variables.text(tasks_name) or str(size), tasks_name)
    if sum(tasks) != size:
        raise UsageError(
            f"{tasks_name} (={variables.text(tasks_name)}) gives {sum(tasks)} workers, "
            f"{size_name} says {size}; start with srun, or unset what was set by hand."
        )
    node_rank = variables.number("SLURM_NODEID", 0)
    if node_rank >= len(tasks):
        raise UsageError(
            f"SLURM_NODEID (={node_rank}) must be below the {len(tasks)} nodes of {tasks_name} "
            f"(={variables.text(tasks_name)}); start with srun."
        )
    local_size = tasks[node_rank]
    local_rank = variables.number("SLURM_LOCALID", 0)
    if local_rank >= local_size:
        raise UsageError(
            f"SLURM_LOCALID (={local_rank}) must be below the {local_size} tasks that {tasks_name} "
            f"(={variables.text(tasks_name)}) gives node {node_rank}; start with srun."
        )
    step = variables.text("SLURM_STEP_ID") or variables.text("SLURM_STEPID")
    job_id = f"{variables.text('SLURM_JOB_ID') or variables.text('SLURM_JOBID') or 0}.{step}"
    address, port = variables.master()
    return Launch(
        "slurm",
        rank,
        size,
        local_rank,
        local_size,
        node_rank,
        len(tasks),
        address or host,
        port or _port_of(job_id),
        job_id,
    )


def _port_of(job_id: str) -> int:
    """A port that all workers of a job derive alike, and other jobs hardly."""
    return _PORTS[zlib.crc32(job_id.encode()) % len(_PORTS)]


def first_host(text: str, name: str = "SLURM_JOB_NODELIST") -> str:
    """The first host of a Slurm node list.

    >>> first_host("rack[1-2]gpu[01-03,07].x,login1")
    'rack1gpu01.x'
    """
    item = re.match(r"([^,\[\]]|\[[^\]]*\])*", text.strip())
    host = re.sub(r"\[(\d+)(-\d+)?(,\d+(-\d+)?)*\]", r"\1", item[0] if item else "")
    if not host:
        raise UsageError(f"{name} (={text!r}) names no host; start with srun, or set MASTER_ADDR.")
    if "[" in host:
        raise UsageError(f"{name} (={text!r}) is no Slurm node list; set MASTER_ADDR.")
    return host


def expand_counts(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """The numbers of a Slurm list of counts.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(
                f"{name} (={text!r}) is no Slurm list of counts such as 2(x3),1; start with srun."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
