"""Environment variables for workers, and their removal, which makes a worker a single process."""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from allstep.env.processes import read_stat
from allstep.env.variables import JOINS, MIN_WORKERS, Variables

RUN_DIR = "ALLSTEP_RUN_DIR"

# Variables in which launchers tell a worker its place among the others.
_OF_LAUNCHERS = re.compile(
    r"((LOCAL|GROUP|ROLE|NODE)_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)|(TORCHELASTIC|OMPI|PMIX|PMI|PRTE|HYDI|MV2_COMM_WORLD)_\w+"
    r"|MPI_LOCAL(RANKID|NRANKS)|JSM_NAMESPACE_\w+|FLUX_(TASK_\w+|JOB_(SIZE|NNODES))"
    r"|HOROVOD_((LOCAL|CROSS)_)?(RANK|SIZE)|PALS_\w*(RANKID|SIZE)|ALPS_APP_PE"
    r"|ALLSTEP_(RUN_DIR|MIN_WORKERS|JOINS)"
    r"|SLURM_(STEP\w+|PROCID|LOCALID|NODEID|GTIDS|NPROCS|NTASKS\w*|TASKS_PER_NODE)"
)


def forget_launch(environ: MutableMapping[str, str] | None = None) -> None:
    """Makes a launcher's worker a single process, and so every process that it starts.

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
    """Silences torch's warning that a group's messages over NCCL are serialised, as they should be.

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
    """The file in which torchrun's agent looks for this worker's error; None without an agent."""
    path = Variables(environ).text("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path is not None else None


def read_run_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder where workers of `allstep launch --run-dir` leave their last state.

    >>> read_run_dir({}) is None
    True
    """
    path = Variables(environ).text(RUN_DIR)
    return None if path is None else Path(path)


def read_agent_id(environ: Mapping[str, str] | None = None) -> str | None:
    """An id of torchrun's agent: the same after each restart of this worker by that agent.

    Returns:
        A string to be compared; None if no agent has started this process.

    >>> read_agent_id({}) is None
    True
    """
    run_id = Variables(environ).text("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    pid = os.getppid()
    try:
        start = read_stat(pid).start
    except OSError:  # the parent may be another user's, or gone
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
    """This process's variables, and those that torchrun would set for a worker on this machine.

    Args:
        rank, size: the worker's rank, and the number of workers.
        store_port: port of the store in which the workers meet.
        job_id: differs between jobs that run at the same time.
        error_file: where the worker reports its failure.
        min_workers: the least number of workers that go on when others are lost; None if one
            worker's failure ends all.
        address: address of the machine that serves the store.
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
    """Environment variables of a worker that joins a run that others have begun.

    Args:
        environ: from `environment_of_worker`, for any rank of the workers that join together.
    """
    return {**environ, JOINS: "1", "RANK": "0", "WORLD_SIZE": "1"} | {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


def environment_of_script(run_dir: str | None) -> dict[str, str]:
    """This process's variables for the user's script that replaces it: one thread, as by torchrun.

    A share of the cores would depend on the number of workers, and with it the result's bits.

    Args:
        run_dir: what `read_run_dir` returns in the script; None to leave this process's own.
    """
    own = {} if run_dir is None else {RUN_DIR: run_dir}
    return {"OMP_NUM_THREADS": "1", **os.environ, **own}


def set_environment(environ: Mapping[str, str]) -> None:
    """Replaces all of this process's environment variables."""
    os.environ.clear()
    os.environ.update(environ)


def read_num_threads(environ: Mapping[str, str] | None = None) -> int | None:
    """Number of threads per worker that the user (or torchrun) set; None if it is not set.

    >>> read_num_threads({"OMP_NUM_THREADS": "4"})
    4
    """
    variables = Variables(environ)
    return variables.positive("OMP_NUM_THREADS") if "OMP_NUM_THREADS" in variables else None
