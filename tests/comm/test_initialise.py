"""Joining the workers that someone has started."""

import datetime
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from allstep.comm import Communicator, init
from allstep.comm.initialise import choose_device
from allstep.comm.rendezvous import rendezvous
from allstep.env import Launch
from allstep.errors import CollectiveTimeoutError, UsageError
from tests.helpers.processes import RemoteError, run_processes, start_processes

SCRIPT = Path(__file__).with_name("script.py")
ROOT = SCRIPT.parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMPI_", "PMIX_", "SLURM_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith((*LAUNCHERS, "TORCHELASTIC_")):
            monkeypatch.delenv(name)


@pytest.fixture
def default_group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_init_of_a_single_process_opens_no_connection():
    with init(device="cpu", timeout_s=7) as comm:
        assert (comm.rank, comm.size, comm.num_nodes) == (0, 1, 1)
        assert comm.timeout_s == 7
        assert comm.process_group is None
        assert not dist.is_initialized()


def test_init_uses_an_existing_default_group(default_group):
    with init(device="cpu") as comm:
        assert comm.process_group is default_group
        assert comm.all_reduce(torch.ones(1)).item() == 1
        assert comm.all_gather_object("x") == ["x"]
    assert dist.is_initialized()


def test_init_with_a_process_group(default_group):
    given = dist.new_group([0])
    assert init(process_group=given, device="cpu").process_group is given


def test_init_with_a_device_mesh(default_group):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    comm = init(process_group=mesh["dp"], device="cpu")
    assert comm.all_gather_object(3) == [3]
    with pytest.raises(UsageError, match=r"DeviceMesh of 2 dimensions .*'dp', 'tp'.*mesh\['dp'\]"):
        init(process_group=mesh)


def test_init_refuses_other_objects_as_group():
    with pytest.raises(UsageError, match="`process_group` is a str"):
        init(process_group="world")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", r"`device` \(='gpu'\) is no device"),
        (3.5, r"`device` \(=3.5\) is no device"),
        ("meta", r"`device` \(='meta'\) is not supported"),
    ],
)
def test_init_refuses_bad_devices(device, message):
    with pytest.raises(UsageError, match=message):
        init(device=device)


@pytest.mark.parametrize(
    ("num_gpus", "device", "message"),
    [
        (2, "cuda:99", r"`device` \(='cuda:99'\): local rank 0 of 1 needs GPU 99, .*device='cpu'"),
        (0, "cuda", r"`device` \(='cuda'\): .* sees no GPU; leave `device` out, or pass 'cpu'"),
    ],
)
def test_init_refuses_missing_gpus(num_gpus, device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(UsageError, match=message):
        init(device=device)


def test_init_takes_the_gpu_of_the_local_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device(None, 1, 2) == torch.device("cuda:1")
    assert choose_device("cuda:0", 1, 2) == torch.device("cuda:0")
    assert choose_device("cpu:0", 1, 2) == torch.device("cpu")
    assert chosen == [torch.device("cuda:1"), torch.device("cuda:0")]
    with pytest.raises(UsageError, match=r"needs GPU 2, .* sees 2; start at most 2 workers"):
        choose_device(None, 2, 3)


def test_bad_timeout():
    with pytest.raises(UsageError, match="`timeout_s`"):
        init(timeout_s=0)


def test_init_sets_up_logging_on_rank_0(monkeypatch):
    logger = logging.getLogger("allstep")
    root = logging.getLogger()
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    init(device="cpu")  # pytest's handlers are on the root logger
    assert logger.handlers == []
    monkeypatch.setattr(root, "handlers", [])
    init(device="cpu")
    init(device="cpu")
    assert len(logger.handlers) == 1
    assert logger.level == logging.INFO


def launch(rank, size=2, **changes):
    fields = {
        "launcher": "openmpi",
        "rank": rank,
        "size": size,
        "local_rank": rank,
        "local_size": size,
        "node_rank": 0,
        "num_nodes": 1,
        "master_addr": None,
        "master_port": None,
        "job_id": "a job",
    }
    return Launch(**(fields | changes))


def test_rendezvous_by_a_file_removes_it(tmp_path):
    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda rank: rendezvous(launch(rank, 3), 20, tmp_path), range(3)))
    stores[2].set("x", "y")
    assert stores[0].get("x") == b"y"
    [folder] = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


def test_rendezvous_refuses_a_folder_that_others_can_write_to(tmp_path):
    (tmp_path / f"allstep-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"allstep-{os.getuid()}").chmod(0o777)
    with pytest.raises(UsageError, match="open to others"):
        rendezvous(launch(0), 1, tmp_path)


def test_rendezvous_times_out(tmp_path):
    with pytest.raises(CollectiveTimeoutError, match=r"`init` on rank 1 of 2: rank 0 did not come"):
        rendezvous(launch(1), 0.1, tmp_path)
    with pytest.raises(CollectiveTimeoutError, match=r"`init` on rank 0 of 2 did not finish"):
        rendezvous(launch(0), 0.1, tmp_path)
    [folder] = tmp_path.iterdir()
    assert list(folder.iterdir()) == []


def test_rendezvous_names_a_port_that_is_taken():
    first = rendezvous(launch(0, master_addr="127.0.0.1", master_port=0), 1)
    with pytest.raises(UsageError, match=r"MASTER_PORT \(=\d+\) is taken on 127.0.0.1"):
        rendezvous(launch(0, master_addr="127.0.0.1", master_port=first.port), 1)


def run(*command: str) -> list[str]:
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


TWO = ["size=2 total=3 places=[(0, 2, 0, 1), (1, 2, 0, 1)] alone=1", "torch.distributed=True"]


@pytest.mark.process
def test_script_as_a_single_process():
    assert run(sys.executable, str(SCRIPT)) == [
        "size=1 total=1 places=[(0, 1, 0, 1)] alone=1",
        "torch.distributed=False",
    ]


@pytest.mark.process
def test_script_under_torchrun():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    assert run(*torchrun, "--nproc-per-node", "2", str(SCRIPT)) == TWO


@pytest.mark.process
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_script_under_mpirun():
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    mpirun = ("mpirun", *as_root, "--oversubscribe", "-n", "2")
    assert run(*mpirun, sys.executable, str(SCRIPT)) == TWO


@pytest.mark.process
def test_script_under_srun_variables(tmp_path):
    """Slurm itself is not needed: its variables are, and a first host that is this one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # a port that was free
    port = store.port
    del store
    script = tmp_path / "start.sh"
    script.write_text(
        f"""
        export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NODEID=0
        export SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2 MASTER_PORT={port}
        SLURM_PROCID=1 SLURM_LOCALID=1 {sys.executable} {SCRIPT} &
        SLURM_PROCID=0 SLURM_LOCALID=0 {sys.executable} {SCRIPT} && wait $!
        """
    )
    assert run("sh", str(script)) == TWO


def join_frameworks_group(comm: Communicator) -> tuple[object, ...]:
    """A framework has initialised torch.distributed and made a mesh of all ranks."""
    default = init(device="cpu", timeout_s=20)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row = init(process_group=mesh["dp"], device="cpu", timeout_s=20)
    ranks = tuple(row.all_gather_object(comm.rank))
    part = row.split(0)
    assert part.all_reduce(torch.ones(1)).item() == 2
    row.close()
    subgroup = dist.new_group([0, 1, 2, 3], timeout=datetime.timedelta(seconds=20))
    same = init(process_group=subgroup, device="cpu")
    assert same.split(same.rank % 2).size == 2
    return default.size, default.local_size, ranks, dist.is_initialized()


@pytest.mark.process
def test_init_in_a_framework_with_a_mesh():
    assert run_processes(4, join_frameworks_group) == [
        (4, 4, (0, 2), True),
        (4, 4, (1, 3), True),
        (4, 4, (0, 2), True),
        (4, 4, (1, 3), True),
    ]


def add(comm: Communicator, value: int) -> tuple[int, int]:
    return comm.rank, int(comm.all_reduce(torch.tensor(value)).item())


@pytest.mark.process
def test_processes_are_ranks():
    assert run_processes(3, add, 2) == [(0, 6), (1, 6), (2, 6)]


def fail(comm: Communicator) -> None:
    if comm.rank == 1:
        raise KeyError("the cause")
    comm.barrier()


@pytest.mark.process
def test_an_error_in_one_process_ends_the_others():
    with pytest.raises(RemoteError, match=r"(?s)on rank 1.*KeyError: 'the cause'"):
        run_processes(3, fail)


def wait_for_each_other(comm: Communicator, folder: Path) -> None:
    while True:
        comm.barrier()
        (folder / str(comm.rank)).touch()


@pytest.mark.process
def test_a_killed_process_ends_the_others(tmp_path):
    with start_processes(3, wait_for_each_other, tmp_path) as workers:
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.01)
        workers.kill(1)
        assert workers.join(timeout_s=30) == [1, -signal.SIGKILL, 1]  # by themselves
        with pytest.raises(RemoteError, match=r"on rank 1:\nit died \(exit code -9\)"):
            workers.results()
