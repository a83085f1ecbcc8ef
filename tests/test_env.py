"""Launchers' environments, as recorded, and contradictions in them."""

import pytest

from allstep.env import Launch, expand_counts, first_host, forget_launch, read_launch
from allstep.errors import UsageError

TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29400",
    "OMP_NUM_THREADS": "1",
    "RANK": "3",
    "ROLE_NAME": "default",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "4",
}
SRUN = {  # srun --ntasks-per-node=2 on four nodes, task 5
    "SLURMD_NODENAME": "gpu03",
    "SLURM_GTIDS": "4,5",
    "SLURM_JOBID": "41207",
    "SLURM_JOB_ID": "41207",
    "SLURM_JOB_NODELIST": "gpu[01-03,07]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_NODELIST": "gpu[01-03,07]",
    "SLURM_NPROCS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[01-03,07]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_TASKS_PER_NODE": "2(x4)",
}
MPIRUN = {  # mpirun -n 2, Open MPI 4.1, rank 1
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1211498497",
    "OMPI_MCA_orte_hnp_uri": "1211498496.0;tcp://192.0.2.2:56921",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "1211498497",
    "PMIX_RANK": "1",
}
LONE = Launch("none", 0, 1, 0, 1, 0, 1, None, None, "none")


def test_torchrun():
    assert read_launch(TORCHRUN) == Launch("torchrun", 3, 4, 1, 2, 1, 2, "gpu01", 29400, "job7")


def test_srun():
    launch = read_launch(SRUN)
    assert launch.master_port in range(20_000, 30_000)
    assert launch == Launch(
        "slurm", 5, 8, 1, 2, 2, 4, "gpu01", launch.master_port, job_id="41207.0"
    )


def test_workers_of_a_step_derive_one_port_and_other_steps_another():
    ports = {read_launch(SRUN | {"SLURM_PROCID": str(rank)}).master_port for rank in range(8)}
    other = read_launch(SRUN | {"SLURM_STEP_ID": "1"}).master_port
    assert len(ports) == 1
    assert other not in ports


def test_srun_with_unlike_nodes():
    variables = SRUN | {
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_PROCID": "6",
        "SLURM_NODEID": "3",
        "SLURM_LOCALID": "0",
    }
    launch = read_launch(variables)
    assert (launch.local_size, launch.num_nodes, launch.size) == (1, 4, 7)


def test_srun_within_a_larger_job():
    variables = SRUN | {
        "SLURM_STEP_NODELIST": "gpu07",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "0",
    }
    launch = read_launch(variables)
    assert (launch.master_addr, launch.size, launch.num_nodes) == ("gpu07", 2, 1)


def test_mpirun_on_one_node():
    launch = read_launch(MPIRUN)
    assert launch == Launch("openmpi", 1, 2, 1, 2, 0, 1, None, None, launch.job_id)
    assert launch.job_id != read_launch(MPIRUN | {"PMIX_NAMESPACE": "8"}).job_id


@pytest.mark.parametrize(("variables", "port"), [({}, None), ({"MASTER_PORT": "31000"}, 31000)])
def test_mpirun_on_two_nodes(variables, port):
    variables = MPIRUN | variables | {"MASTER_ADDR": "gpu01", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    launch = read_launch(variables | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert launch.master_addr == "gpu01"
    assert launch.master_port == port or launch.master_port in range(20_000, 30_000)
    assert (launch.node_rank, launch.num_nodes) == (1, 2)


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN, MPIRUN])
def test_a_worker_becomes_a_lone_process(variables):
    left = {**variables, "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0"}
    assert read_launch(left) != LONE
    forget_launch(left)
    assert read_launch(left) == LONE
    assert not [name for name in left if "RANK" in name or "SIZE" in name or "PROC" in name]
    # The machine, its job and the threads are still the user's to know.
    kept = {"HOME", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "OMP_NUM_THREADS"}
    assert kept & {*variables, "HOME", "CUDA_VISIBLE_DEVICES"} <= set(left)


@pytest.mark.parametrize("variables", [SRUN, MPIRUN])
def test_a_given_master_wins(variables):
    launch = read_launch(variables | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (launch.master_addr, launch.master_port) == ("10.0.0.1", 1234)


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"},
        {"RANK": "", "WORLD_SIZE": ""},
        without(SRUN, "SLURM_STEP_ID", "SLURM_STEPID"),  # a batch script
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
        without(SRUN, "SLURM_PROCID"),  # the shell of salloc
        MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_lone_processes(variables):
    assert read_launch(variables) == LONE


@pytest.mark.parametrize("outer", [SRUN, MPIRUN])
def test_torchrun_inside_another_launcher_wins(outer):
    assert read_launch(outer | TORCHRUN) == read_launch(TORCHRUN)


def test_mpirun_inside_a_slurm_job_wins():
    assert read_launch(SRUN | MPIRUN).launcher == "openmpi"


def test_torchruns_variables_by_hand():
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert read_launch(by_hand) == Launch("torchrun", 1, 2, 1, 2, 0, 1, "a", 1, "torchrun")
    assert read_launch(by_hand | MPIRUN) == read_launch(by_hand)  # they agree


HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, r"RANK \(=0\) is set, but WORLD_SIZE is not; .*unset RANK"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE \(=2\) is set, but RANK is not"),
        (HAND | {"RANK": "2"}, r"RANK \(=2\) must be below WORLD_SIZE \(=2\)"),
        (HAND | {"RANK": "first"}, r"RANK \(='first'\) must be a whole number"),
        (HAND | {"RANK": "-1"}, r"RANK \(='-1'\) must be a whole number"),
        (HAND | {"WORLD_SIZE": "0"}, r"WORLD_SIZE \(=0\) must be at least 1"),
        (HAND | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, r"LOCAL_RANK \(=2\) must be below"),
        (HAND | {"LOCAL_WORLD_SIZE": "4"}, r"LOCAL_WORLD_SIZE \(=4\) must not be above WORLD_SIZE"),
        (HAND | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "1"}, r"GROUP_RANK \(=1\) must be below"),
        (HAND | {"MASTER_PORT": "70000"}, r"MASTER_PORT \(=70000\) must be a port"),
        (without(HAND, "MASTER_ADDR"), r"MASTER_ADDR is not; .*start with torchrun"),
        (without(HAND, "MASTER_PORT"), r"MASTER_PORT is not"),
        (MPIRUN | HAND, r"RANK \(=0\) .* contradict OMPI_COMM_WORLD_RANK \(=1\).*unset RANK and"),
        (SRUN | HAND, r"RANK \(=0\) .* contradict SLURM_PROCID \(=5\) and SLURM_STEP_NUM_TASKS"),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "2"}, r"OMPI_COMM_WORLD_RANK \(=2\) must be below"),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "5"}, "OMPI_COMM_WORLD_LOCAL_RANK .* below"),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "9"}, "LOCAL_SIZE .*must not be above OMPI_COMM"),
        (
            MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "mpirun -x MASTER_ADDR=.* -x MASTER_PORT=",
        ),
        (SRUN | {"SLURM_PROCID": "8"}, r"SLURM_PROCID \(=8\) must be below SLURM_STEP_NUM_TASKS"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, r"\(=2\(x3\)\) gives 6 workers, .* says 8"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, r"\(='two'\) is no Slurm list of counts"),
        (SRUN | {"SLURM_NODEID": "4"}, r"SLURM_NODEID \(=4\) must be below the 4 nodes"),
        (SRUN | {"SLURM_LOCALID": "2"}, r"SLURM_LOCALID \(=2\) must be below the 2 tasks"),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[a-b]"}, r"\(='gpu\[a-b\]'\) is no Slurm node list"),
        (
            without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
            "SLURM_JOB_NODELIST .* names no host; .*set MASTER_ADDR",
        ),
    ],
)
def test_contradictions_name_the_variables_and_the_cure(variables, message):
    with pytest.raises(UsageError, match=message):
        read_launch(variables)


def test_a_missing_variable_is_named():
    with pytest.raises(UsageError, match="SLURM_STEP_NUM_TASKS"):
        read_launch(HAND | SRUN | {"SLURM_STEP_NUM_TASKS": "many"})


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu[01-03,07]", "gpu01"),
        ("login1", "login1"),
        ("a,b[9-11],c-2", "a"),
        ("b[9,11],c-2", "b9"),
        ("r[1-2]n[01-02].x", "r1n01.x"),
    ],
)
def test_first_host_of_node_lists(text, host):
    assert first_host(text) == host


def test_counts():
    assert expand_counts("2(x3),1,4(x1)") == [2, 2, 2, 1, 4]
