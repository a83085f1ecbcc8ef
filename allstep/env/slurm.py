"""The variables of Slurm's srun."""

import re

from allstep.env.launch import Launch, port_of
from allstep.env.variables import Variables
from allstep.errors import UsageError


def was_started_by_srun(variables: Variables) -> bool:
    """Whether srun started this process; it does not start a batch script."""
    has_step = "SLURM_STEP_ID" in variables or "SLURM_STEPID" in variables
    return "SLURM_PROCID" in variables and has_step


def is_slurm_step(variables: Variables) -> bool:
    """Whether srun started this process together with others."""
    size = variables.number(slurm_size_name(variables), 1)
    return was_started_by_srun(variables) and size > 1


def slurm_size_name(variables: Variables) -> str:
    """Name of the variable that says how many workers srun has started."""
    return variables.first_set("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def read_slurm(variables: Variables) -> Launch:
    """Reads the variables of Slurm's srun."""
    size_name = slurm_size_name(variables)
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
        port or port_of(job_id),
        job_id,
    )


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
