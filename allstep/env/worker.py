"""What a worker is told in the environment, and how a process stops being one."""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from allstep.env.processes import read_stat
from allstep.env.variables import JOINS, MIN_WORKERS, Variables

RUN_DIR = "ALLSTEP_RUN_DIR"

# What launchers tell a worker of itself and its peers.
_OF_LAUNCHERS = re.compile(
    r"((LOCAL|GROUP|ROLE|NODE)_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)|(TORCHELASTIC|OMPI|PMIX|PMI|PRTE|HYDI|MV2_COMM_WORLD)_\w+"
    r"|MPI_LOCAL(RANKID|NRANKS)|JSM_NAMESPACE_\w+|FLUX_(TASK_\w+|JOB_(SIZE|NNODES))"
    r"|HOROVOD_((LOCAL|CROSS)_)?(RANK|SIZE)|PALS_\w*(RANKID|SIZE)|ALPS_APP_PE"
    r"|ALLSTEP_(RUN_DIR|MIN_WORKERS|JOINS)"
    r"|SLURM_(STEP\w+|PROCID|LOCALID|NODEID|GTIDS|NPROCS|NTASKS\w*|TASKS_PER_NODE)"
)


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


def allow_messages_in_turn(environ: MutableMapping[str, str] | None = None) -> None:
    """Has torch not warn that a group's messages over NCCL go one after the other, as is meant.

    Args:
        environ: variables to change; the process's own if None.

    >>> variables = {}
    >>> allow_messages_in_turn(variables)
    >>> variables
    {'TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING': 'false'}
    """
    variables = os.environ if environ is None else environ
    variables.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")


def read_error_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where torchrun's agent looks for what made this worker fail; None without an agent."""
    path = Variables(environ).text("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path is not None else None


def read_run_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder in which `allstep launch --run-dir` has workers leave their last state.

    >>> read_run_dir({}) is None
    True
    """
    path = Variables(environ).text(RUN_DIR)
    return None if path is None else Path(path)


def read_agent_id(environ: Mapping[str, str] | None = None) -> str | None:
    """What is the same each time that torchrun's agent starts this worker again, and only then.

    Returns:
        A text for comparing; None if no agent has started this process.

    >>> read_agent_id({}) is None
    True
    """
    run_id = Variables(environ).text("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    pid = os.getppid()
    try:
        start = read_stat(pid).start
    except OSError:  # it may be someone else's, or gone
        start = "?"
    return f"{run_id} {socket.gethostname()} {pid} {start}"


def environment_of_worker(
    rank: int,
    size: int,
    store_port: int,
    job_id: str,
    error_file: Path,
    min_workers: int | None = None,
    address: str = "127.0.0.1",
) -> dict[str, str]:
    """This process's variables, and what torchrun would tell a worker on this machine.

    Args:
        rank, size: number of the worker and of all.
        store_port: of the store in which the workers meet.
        job_id: unlike for jobs that run at the same time.
        error_file: where the worker reports its failure.
        min_workers: how few may go on without those that are lost; None if all end then.
        address: of the machine that serves the store.
    """
    environ = dict(os.environ)
    forget_launch(environ)
    if min_workers is not None:
        environ[MIN_WORKERS] = str(min_workers)
    return environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


def environment_of_joiner(environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker is told that comes to a run which others have begun.

    Args:
        environ: of `environment_of_worker`, for any rank of those that come together.
    """
    return {**environ, JOINS: "1", "RANK": "0", "WORLD_SIZE": "1"} | {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


def environment_of_script(run_dir: str | None) -> dict[str, str]:
    """This process's variables for a user's script in its place, with one thread as by torchrun.

    A share of the cores would depend on the number of workers, and so the bits.

    Args:
        run_dir: what `read_run_dir` gives there; None for nothing.
    """
    own = {} if run_dir is None else {RUN_DIR: run_dir}
    return {"OMP_NUM_THREADS": "1", **os.environ, **own}


def set_environment(environ: Mapping[str, str]) -> None:
    """Puts other variables in place of all of this process's own."""
    os.environ.clear()
    os.environ.update(environ)


def read_num_threads(environ: Mapping[str, str] | None = None) -> int | None:
    """The threads that the user (or torchrun) wants in each worker; None if no one said.

    >>> read_num_threads({"OMP_NUM_THREADS": "4"})
    4
    """
    variables = Variables(environ)
    return variables.positive("OMP_NUM_THREADS") if "OMP_NUM_THREADS" in variables else None
