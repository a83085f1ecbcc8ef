"""Reads the environment variables that launchers set.

torchrun's take precedence over those of MPI's launchers, and these over srun's (srun starts the
helper processes of MPI's launchers). A process that none of them started is a single process. One
that is given a rank but no number of workers is refused: it would silently train by itself.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allstep.env.launch import Launch, port_of
from allstep.env.processes import read_stat
from allstep.env.slurm import is_slurm_step, read_slurm, slurm_size_name, was_started_by_srun
from allstep.env.variables import JOINS, MIN_WORKERS, Variables
from allstep.errors import UsageError


@dataclass(frozen=True)
class _Names:
    """Names of the environment variables that a launcher sets for its workers.

    Attributes:
        launcher: name of the launcher.
        rank, size: variables of this worker's rank and of the number of workers.
        local_rank, local_size: the same within this node; several names where versions differ.
        num_nodes: variable of the number of nodes.
        job: variables that differ between jobs on a machine; some versions set only some of them.
        export: a command that passes variables to all workers.
    """

    launcher: str
    rank: str
    size: str
    local_rank: tuple[str, ...] = ("",)
    local_size: tuple[str, ...] = ("",)
    num_nodes: str = ""
    job: tuple[str, ...] = ()
    export: str = ""


_MASTER = "MASTER_ADDR=HOST_OF_RANK_0", "MASTER_PORT=29500"
_PMI = _Names(
    "mpich",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    job=("PMI_JOBID", "PALS_APID"),
    export="mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500 ...",
)
_LAUNCHERS = (  # generic PMI last: most other launchers set its variables too
    _Names(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=(
            "PMIX_NAMESPACE",
            "OMPI_MCA_ess_base_jobid",
            "OMPI_MCA_orte_hnp_uri",
            "OMPI_MCA_orte_precondition_transports",
        ),
        export="mpirun -x {} -x {} ...".format(*_MASTER),
    ),
    _Names(
        "mvapich2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        export="mpirun_rsh ... {} {} python ...".format(*_MASTER),
    ),
    _Names(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "LSB_JOBID"),
        export="jsrun -E {} -E {} ...".format(*_MASTER),
    ),
    _Names(
        "flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        ("FLUX_TASK_LOCAL_ID",),
        num_nodes="FLUX_JOB_NNODES",
        job=("FLUX_JOB_ID",),
        export="flux run --env={} --env={} ...".format(*_MASTER),
    ),
    _Names(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
        job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        export="env {} {} horovodrun ...".format(*_MASTER),
    ),
    _PMI,
)
# Variables that show that a launcher started this process, but not the number of workers.
_TRACES = ("PMIX_RANK", "PMI_ID", "MPI_LOCALRANKID", "PALS_RANKID", "ALPS_APP_PE")


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Reads which launcher started this process, its rank and the number of workers.

    Args:
        environ: variables to read; the process's own if None.

    Raises:
        UsageError: if the variables contradict each other, or come from a launcher that does not
            say how many workers it started.

    >>> read_launch({}).launcher
    'none'
    >>> read_launch({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).rank
    1
    """
    variables = Variables(environ)
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _read_torchrun(variables)
    names = _launcher_of(variables)
    if names is None:
        _check_no_traces(variables)
        return Launch("none", 0, 1, 0, 1, 0, 1, None, None, "none")
    return read_slurm(variables) if names.launcher == "slurm" else _read_mpi(variables, names)


def _launcher_of(variables: Variables) -> _Names | None:
    """The launcher that started several workers, other than torchrun; None if there is none."""
    srun = None
    if is_slurm_step(variables):
        srun = _Names("slurm", "SLURM_PROCID", slurm_size_name(variables))
    for names in _LAUNCHERS:
        if _are_set(variables, names) and variables.positive(names.size) > 1:
            # srun may set PMI's variables too, and its own say more.
            if names is _PMI and srun and _numbers(variables, names) == _numbers(variables, srun):
                return srun
            return names
    return srun


def _are_set(variables: Variables, names: _Names) -> bool:
    return names.rank in variables and names.size in variables


def _numbers(variables: Variables, names: _Names) -> tuple[int, int]:
    return variables.number(names.rank), variables.number(names.size)


def _check_no_traces(variables: Variables) -> None:
    """Refuses a process that looks like one of several workers but would train by itself."""
    if was_started_by_srun(variables) or any(_are_set(variables, names) for names in _LAUNCHERS):
        return  # a launcher's only worker
    told = [name for names in _LAUNCHERS for name in (names.rank, names.size)]
    for name in (*told, *_TRACES):
        if name in variables:
            raise UsageError(
                f"{name} (={variables.text(name)}) says that a launcher has started this worker, "
                "but not which of how many it is; set RANK, WORLD_SIZE, MASTER_ADDR and "
                f"MASTER_PORT as torchrun does, or unset {name} for a single process."
            )


def _read_torchrun(variables: Variables) -> Launch:
    """Reads torchrun's variables, or the same ones set by hand."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in variables and other not in variables:
            raise UsageError(
                f"{name} (={variables.text(name)}) is set, but {other} is not; set both as "
                f"torchrun does, or unset {name}. Under Lightning call `init` when the Trainer or "
                "Fabric has connected the workers: after `fabric.launch()`."
            )
    rank, size = variables.place("RANK", "WORLD_SIZE", 0, 1)
    if "TORCHELASTIC_RUN_ID" not in variables:
        _check_no_other_launcher(variables, rank, size)
    local_rank, local_size = variables.local_place(
        "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", rank, size
    )
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
        "torchrun",
        rank,
        size,
        local_rank,
        local_size,
        node_rank,
        num_nodes,
        address,
        port,
        job_id,
        has_store=variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=variables.number("TORCHELASTIC_RESTART_COUNT", 0),
        min_workers=variables.positive(MIN_WORKERS) if MIN_WORKERS in variables else None,
        joins=JOINS in variables,
    )


def _check_no_other_launcher(variables: Variables, rank: int, size: int) -> None:
    """Refuses RANK and WORLD_SIZE set by hand that contradict those of mpirun or srun."""
    names = _launcher_of(variables)
    if names is None or (rank, size) == _numbers(variables, names):
        return
    raise UsageError(
        f"RANK (={rank}) and WORLD_SIZE (={size}) contradict "
        f"{names.rank} (={variables.number(names.rank)}) and "
        f"{names.size} (={variables.number(names.size)}); unset RANK and WORLD_SIZE."
    )


def _read_mpi(variables: Variables, names: _Names) -> Launch:
    """Reads the variables of mpirun, mpiexec and similar launchers."""
    rank, size = variables.place(names.rank, names.size, 0, 1)
    local_rank, local_size, num_nodes = _local_place(variables, names, rank, size)
    job_id = "/".join(filter(None, map(variables.text, names.job)))
    address, port = variables.master()
    if num_nodes > 1 and (address is None or (port is None and not job_id)):
        raise UsageError(
            f"{names.launcher} started {names.size} (={size}) workers on {num_nodes} nodes or "
            "more, and does not say where rank 0 is; set MASTER_ADDR and MASTER_PORT for all "
            f"workers: {names.export}"
        )
    if address is not None and port is None and job_id:
        port = port_of(job_id)
    return Launch(
        names.launcher,
        rank,
        size,
        local_rank,
        local_size,
        rank // local_size,  # a guess: none of these launchers gives a node's rank
        num_nodes,
        address,
        port if address is not None else None,
        job_id or _starter_id(names.rank),
    )


def _local_place(variables: Variables, names: _Names, rank: int, size: int) -> tuple[int, int, int]:
    """Rank and size on this node, and the number of nodes, as far as the variables give them."""
    rank_name = variables.first_set(*names.local_rank)
    size_name = variables.first_set(*names.local_size)
    if size_name in variables or not names.num_nodes:
        local_rank, local_size = variables.local_place(rank_name, size_name, names.size, rank, size)
        return local_rank, local_size, -(-size // local_size)
    num_nodes = min(variables.positive(names.num_nodes, 1), size)
    local_rank = variables.number(rank_name, rank)
    return local_rank, max(local_rank + 1, -(-size // num_nodes)), num_nodes


def _starter_id(rank_name: str) -> str:
    """Id of the process that started this node's workers: the nearest ancestor that is no worker.

    A script may stand between that process and this one.
    """
    pid = os.getppid()
    while True:
        try:
            stat = read_stat(pid)
            names = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # the process may be another user's
            return f"process {pid}"
        if pid == 1 or not any(name.startswith(f"{rank_name}=".encode()) for name in names):
            return f"process {pid}, started at {stat.start}"
        pid = stat.parent
