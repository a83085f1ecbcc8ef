"""Launchers' environments, as recorded, and contradictions in them."""

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from allstep.env import (
    Launch,
    expand_counts,
    first_host,
    forget_launch,
    make_room,
    patient_threads,
    read_launch,
)
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
HYDRA = {  # mpiexec.hydra -n 2, MPICH 4.0, rank 1; Intel MPI's are alike
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
PALS = {  # mpiexec -n 2 of HPE Cray's PALS, rank 1
    "PALS_APID": "0d7a",
    "PALS_LOCAL_RANKID": "1",
    "PALS_RANKID": "1",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
MVAPICH2 = {  # mpirun_rsh -np 2, rank 1
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "PMI_ID": "1",
}
JSRUN = {  # jsrun -n 2, rank 1
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "2",
    "PMIX_NAMESPACE": "4",
    "PMIX_RANK": "1",
}
FLUX = {  # flux run -n 2, rank 1
    "FLUX_JOB_ID": "3527450624",
    "FLUX_JOB_NNODES": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_TASK_RANK": "1",
    "PMI_FD": "9",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
HOROVOD = {  # horovodrun -np 2, rank 1
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "33001",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
}
OF_MPI = {
    "openmpi": MPIRUN,
    "mpich": HYDRA,
    "mvapich2": MVAPICH2,
    "jsrun": JSRUN,
    "flux": FLUX,
    "horovodrun": HOROVOD,
}
LONE = Launch("none", 0, 1, 0, 1, 0, 1, None, None, "none")


def test_torchrun():
    place = ("torchrun", 3, 4, 1, 2, 1, 2, "gpu01", 29400, "job7")
    assert read_launch(TORCHRUN) == Launch(*place, has_store=True)
    again = read_launch(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert again == Launch(*place, has_store=True, attempt=2)


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


@pytest.mark.parametrize(("launcher", "variables"), [*OF_MPI.items(), ("mpich", PALS)])
def test_launchers_of_mpi_on_one_node(launcher, variables):
    launch = read_launch(variables)
    assert launch == Launch(launcher, 1, 2, 1, 2, 0, 1, None, None, launch.job_id)


def test_other_jobs_of_mpirun_have_other_ids():
    launch = read_launch(MPIRUN)
    assert launch.job_id != read_launch(MPIRUN | {"PMIX_NAMESPACE": "8"}).job_id


@pytest.mark.parametrize(("variables", "port"), [({}, None), ({"MASTER_PORT": "31000"}, 31000)])
def test_mpirun_on_two_nodes(variables, port):
    variables = MPIRUN | variables | {"MASTER_ADDR": "gpu01", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    launch = read_launch(variables | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert launch.master_addr == "gpu01"
    assert launch.master_port == port or launch.master_port in range(20_000, 30_000)
    assert (launch.node_rank, launch.num_nodes) == (1, 2)


SECOND_NODE = {  # rank 1 of 2, alone on its node
    "openmpi": {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    "mpich": {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
    "mvapich2": {"MV2_COMM_WORLD_LOCAL_RANK": "0", "MV2_COMM_WORLD_LOCAL_SIZE": "1"},
    "jsrun": {"JSM_NAMESPACE_LOCAL_RANK": "0", "JSM_NAMESPACE_LOCAL_SIZE": "1"},
    "flux": {"FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_NNODES": "2"},
    "horovodrun": {"HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"},
}


@pytest.mark.parametrize(("launcher", "changes"), SECOND_NODE.items())
def test_launchers_of_mpi_on_two_nodes_need_to_be_told_where_rank_0_is(launcher, changes):
    variables = OF_MPI[launcher] | changes
    with pytest.raises(
        UsageError,
        match=r"_SIZE \(=2\) .*set MASTER_ADDR and MASTER_PORT .*MASTER_ADDR.HOST_OF_RANK",
    ):
        read_launch(variables)
    launch = read_launch(variables | {"MASTER_ADDR": "a", "MASTER_PORT": "29500"})
    assert launch == Launch(launcher, 1, 2, 0, 1, 1, 2, "a", 29500, launch.job_id)


def test_hydra_on_two_nodes_needs_a_port_too():
    variables = HYDRA | SECOND_NODE["mpich"] | {"MASTER_ADDR": "a"}
    with pytest.raises(UsageError, match="-genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT"):
        read_launch(variables)


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN, *OF_MPI.values(), PALS])
def test_a_worker_becomes_a_lone_process(variables):
    left = {**variables, "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0"}
    assert read_launch(left) != LONE
    forget_launch(left)
    assert read_launch(left) == LONE
    assert not [name for name in left if "RANK" in name or "SIZE" in name or "PROC" in name]
    # The machine, its job and the threads are still the user's to know.
    kept = {"HOME", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "OMP_NUM_THREADS"}
    assert kept & {*variables, "HOME", "CUDA_VISIBLE_DEVICES"} <= set(left)


@pytest.mark.parametrize("variables", [SRUN, *OF_MPI.values()])
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
        HYDRA | {"PMI_SIZE": "1"},
        FLUX | {"FLUX_JOB_SIZE": "1", "PMI_SIZE": "1"},
        # srun --mpi=pmix --pty bash
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
    ],
)
def test_lone_processes(variables):
    assert read_launch(variables) == LONE


@pytest.mark.parametrize(
    "name",
    [
        "PMIX_RANK",
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_ID",
        "MPI_LOCALRANKID",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        "JSM_NAMESPACE_RANK",
        "FLUX_TASK_RANK",
        "HOROVOD_RANK",
        "PALS_RANKID",
        "ALPS_APP_PE",
    ],
)
def test_a_launcher_that_is_not_understood_is_no_lone_copy(name):
    with pytest.raises(
        UsageError,
        match=rf"^{name} \(=1\) says that a launcher .*set RANK, WORLD_SIZE, .*unset {name}",
    ):
        read_launch({name: "1"})
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert read_launch(by_hand | {name: "1"}).size == 2


def test_srun_says_more_than_the_pmi_that_it_starts():
    pmi = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "3"}
    assert read_launch(SRUN | pmi) == read_launch(SRUN)


def test_mpiexec_that_srun_helps_wins():
    assert read_launch(SRUN | HYDRA).launcher == "mpich"


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
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE \(=2\) is set, but RANK is not; .*Lightning"),
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
        (HYDRA | HAND, r"contradict PMI_RANK \(=1\) and PMI_SIZE \(=2\); unset RANK and"),
        (HYDRA | {"PMI_RANK": "2"}, r"PMI_RANK \(=2\) must be below PMI_SIZE"),
        (FLUX | {"FLUX_JOB_NNODES": "0"}, r"FLUX_JOB_NNODES \(=0\) must be at least 1"),
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


@pytest.fixture
def few_descriptors():
    """The soft limit of open files just above those that are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_room_for_descriptors_is_made_as_far_as_it_goes(few_descriptors):
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 40 < make_room(10) < 60
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, highest)  # there was enough
    assert make_room(200) > 300
    assert limit + 300 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] < limit + 400
    assert make_room(highest) < highest
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (highest, highest)


def test_threads_started_inside_are_patient_and_the_caller_is_not():
    policies = []

    def note():
        policies.append(os.sched_getscheduler(0))

    def look():
        thread = threading.Thread(target=note)
        thread.start()
        thread.join()
        return policies.pop()

    with patient_threads():
        assert look() == os.SCHED_BATCH
    assert look() == os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_somebody_chose_is_kept():
    def choose():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with patient_threads():
            inside = os.sched_getscheduler(0)
        return inside, os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as pool:  # whose thread ends with it
        assert pool.submit(choose).result() == (os.SCHED_IDLE, os.SCHED_IDLE)
