"""Joining the workers that someone has started."""

import datetime
import logging
import os
import pickle
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from allstep.comm import Communicator, init
from allstep.comm.gather_places import gather_places
from allstep.comm.initialise import check_descriptors, choose_device, device_of_group
from allstep.comm.places import Place, check_own_devices
from allstep.comm.rendezvous import Rendezvous
from allstep.device import using_driver
from allstep.env import Launch
from allstep.errors import (
    AllstepError,
    CollectiveTimeoutError,
    DisagreementError,
    PeerLostError,
    UsageError,
)
from tests.helpers import mpi, ports
from tests.helpers.gpus import Gpus
from tests.helpers.processes import RemoteError, run_processes, start_processes

SCRIPT = Path(__file__).with_name("script.py")
ROOT = SCRIPT.parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMPI_", "PMI", "SLURM_")


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
def test_init_refuses_missing_gpus(num_gpus, device, message):
    with using_driver(Gpus(num_gpus)), pytest.raises(UsageError, match=message):
        init(device=device)


def test_init_takes_the_gpu_of_the_local_rank():
    gpus = Gpus(2)
    with using_driver(gpus):
        assert choose_device(None, 1, 2) == torch.device("cuda:1")
        assert choose_device("cuda:0", 1, 2) == torch.device("cuda:0")
        assert choose_device("cpu:0", 1, 2) == torch.device("cpu")
        assert gpus.chosen == [torch.device("cuda:1"), torch.device("cuda:0")]
        with pytest.raises(UsageError, match=r"needs GPU 2, .* sees 2; start at most 2 workers"):
            choose_device(None, 2, 3)


def test_init_takes_the_only_gpu_that_a_process_sees():
    """As with Slurm's `--gpus-per-task=1`; whether it is its own, workers find out together."""
    with using_driver(Gpus(1)):
        assert choose_device(None, 3, 4) == torch.device("cuda:0")
        assert choose_device("cuda", 3, 4) == torch.device("cuda:0")
        with pytest.raises(UsageError, match="needs GPU 1, but this process sees 1"):
            choose_device("cuda:1", 1, 4)


def test_two_workers_on_one_gpu_are_refused():
    places = [Place("a", 1, accelerator="x"), Place("a", 2, accelerator="y"), Place("b", 3)]
    check_own_devices([*places, Place("b", 4)])
    with pytest.raises(
        UsageError,
        match=r"ranks 1 and 3 both compute on accelerator y of a.* CUDA_VISIBLE_DEVICES= ",
    ):
        check_own_devices([*places, Place("a", 4, accelerator="y")])


def test_gpu_of_a_frameworks_group_is_known_before_the_ranks_meet():
    class Group:
        bound_device_id = torch.device("cuda:3")

    assert device_of_group(Group(), None) == torch.device("cuda:3")
    assert device_of_group(Group(), "cuda") == torch.device("cuda:3")
    assert device_of_group(Group(), "cuda:2") == torch.device("cuda:2")
    Group.bound_device_id = None
    assert device_of_group(Group(), None) is device_of_group(Group(), "cpu") is None
    assert device_of_group(Group(), 3.5) is None


@pytest.mark.parametrize("timeout_s", [0, 1e10])
def test_bad_timeout(timeout_s):
    """torch's clocks run over at 292 years: such a wait would be over at once."""
    with pytest.raises(UsageError, match="`timeout_s`"):
        init(timeout_s=timeout_s)
    with Communicator.single_process() as comm, pytest.raises(UsageError, match="`timeout_s`"):
        comm.set_timeout(timeout_s)


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


HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 4096)


@pytest.fixture
def free_port():
    return ports.free_port()


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


def connect(of, timeout_s, folder=None, meetings=None):
    meeting = Rendezvous(of, timeout_s, folder)
    if meetings is not None:
        meetings.append(meeting)  # which serves at MASTER_PORT until it is let go
    try:
        store = meeting.connect()
        gather_places(store, of, Place.own(), meeting.deadline_s, timeout_s)
        return store
    finally:
        meeting.close()


def connect_all(launches, timeout_s=20, folder=None):
    """What each launch comes to, a thread each: a store, or an error."""
    meetings = []

    def outcome(of):
        try:
            return connect(of, timeout_s, folder, meetings)
        except AllstepError as error:
            return error

    with ThreadPoolExecutor(len(launches)) as pool:
        return list(pool.map(outcome, launches))


def test_rendezvous_by_a_file_removes_it(tmp_path):
    stores = connect_all([launch(rank, 3) for rank in range(3)], folder=tmp_path)
    stores[2].set("x", "y")
    assert stores[0].get("x") == b"y"
    [folder] = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


def test_rendezvous_refuses_a_folder_that_others_can_write_to(tmp_path):
    (tmp_path / f"allstep-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"allstep-{os.getuid()}").chmod(0o777)
    with pytest.raises(UsageError, match="open to others"):
        connect(launch(0), 1, tmp_path)


def test_rendezvous_times_out(tmp_path):
    with pytest.raises(CollectiveTimeoutError, match=r"on rank 1 of 2 .*rank 0 did not come"):
        connect(launch(1), 0.1, tmp_path)
    message = (
        r"`init` on rank 0 of 2: rank 1 did not come within 5 s; there: rank 0 \(process \d+ on "
    )
    with pytest.raises(CollectiveTimeoutError, match=message):
        connect(launch(0), 5.0, tmp_path)  # in which a busy machine serves a store
    [folder] = tmp_path.iterdir()
    assert list(folder.iterdir()) == []


@contextmanager
def listener():
    """A port on which connections are accepted, and nothing is said."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def by_hand(rank, size, port, **changes):
    """Somebody set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    return launch(
        rank,
        size,
        **{"launcher": "torchrun", "master_addr": "127.0.0.1", "master_port": port} | changes,
    )


def test_a_port_that_is_taken_is_named():
    with (
        listener() as port,
        pytest.raises(
            UsageError, match=rf"MASTER_PORT \(={port}\) can't .*: address already in use"
        ),
    ):
        connect(by_hand(0, 2, port), 1)


def test_a_host_that_nobody_knows_is_named():
    message = r"MASTER_ADDR \(='nowhere.invalid'\), .* is no host that .* knows \(.+\)"
    with pytest.raises(UsageError, match=message):
        connect(by_hand(1, 2, 1, master_addr="nowhere.invalid"), 20)


def test_a_name_that_no_host_can_have_is_named():
    message = r"MASTER_ADDR \(='.alpha'\), .* is no host that .* knows \(no name has this form\)"
    with pytest.raises(UsageError, match=message):
        connect(by_hand(1, 2, 1, master_addr=".alpha"), 20)


def test_an_address_that_is_not_of_the_host_of_rank_0_is_named(free_port):
    """240.0.0.1 is nobody's."""
    message = rf"rank 0 can't reach itself at 240.0.0.1:{free_port}; set MASTER_ADDR to an address"
    with pytest.raises(CollectiveTimeoutError, match=message):
        connect(by_hand(0, 2, free_port, master_addr="240.0.0.1"), 1)


def test_a_port_where_nobody_listens_is_named(free_port):
    message = rf"rank 0 can't be reached at 127.0.0.1:{free_port} \(Connection refused\)"
    with pytest.raises(CollectiveTimeoutError, match=message):
        connect(by_hand(1, 2, free_port), 1)


def test_a_wait_for_a_store_is_spoken_of(free_port, caplog):
    meeting = Rendezvous(by_hand(1, 2, free_port), 2.0, notice_s=0.05)
    with pytest.raises(CollectiveTimeoutError):
        meeting.connect()
    [warning] = caplog.messages
    assert warning.startswith("`init` on rank 1 still waits: rank 0 can't be reached at 127.0.0.1")


def test_a_wait_for_a_worker_is_spoken_of(caplog):
    soon_s = time.monotonic() + 0.5
    with pytest.raises(CollectiveTimeoutError):
        gather_places(dist.HashStore(), launch(0, 3), Place.own(), soon_s, 0.5, notice_s=0.05)
    assert re.fullmatch(
        r"`init` has waited 0.05 s for ranks 1, 2; 1 of 3 workers came, on .+", caplog.messages[0]
    )


def test_init_ends_in_time_where_a_port_accepts_and_says_nothing(monkeypatch):
    with listener() as port:
        for name, value in HAND.items() | {("MASTER_PORT", str(port))}:
            monkeypatch.setenv(name, value)
        with pytest.raises(
            CollectiveTimeoutError,
            match=rf"`init` on rank 1 of 2 .* within 1 s: 127.0.0.1:{port} accepts .* not answer",
        ):
            init(device="cpu", timeout_s=1)


def test_a_store_that_is_gone_while_a_worker_waits_is_told(monkeypatch):
    """Rank 0 ended, or it was another program's store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.set("allstep/port", str(store.port))
    own_keys = store.num_keys()
    for name, value in HAND.items() | {("MASTER_PORT", str(store.port))}:
        monkeypatch.setenv(name, value)

    def end_once_somebody_came():
        nonlocal store
        while store.num_keys() < own_keys + 3:  # came, with what it says of itself, counted
            time.sleep(0.01)
        del store

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(end_once_somebody_came)
        with pytest.raises(PeerLostError, match="`init` on rank 1 of 2: another rank closed its"):
            init(device="cpu", timeout_s=60)
        ended.result()


def test_strangers_on_the_port_of_rank_0_are_no_workers(free_port):
    def disturb():
        """Holds, closes and sends garbage, as soon as rank 0 listens; then lets rank 1 come."""
        strangers = []
        while len(strangers) < 5:
            try:
                strangers.append(socket.create_connection(("127.0.0.1", free_port)))
            except ConnectionRefusedError:
                time.sleep(0.01)
        for stranger, garbage in zip(strangers[2:], GARBAGE, strict=True):
            stranger.sendall(garbage)
        strangers[1].close()
        store = connect(by_hand(1, 2, free_port), 20)
        for stranger in strangers:
            stranger.close()
        return store

    with ThreadPoolExecutor() as pool:
        other = pool.submit(disturb)
        store = connect(by_hand(0, 2, free_port), 20)
        other.result().set("x", "y")
    assert store.get("x") == b"y"


def test_workers_that_were_told_unlike_numbers_are_named(free_port):
    launches = [by_hand(0, 2, free_port), by_hand(1, 3, free_port), by_hand(2, 3, free_port)]
    for outcome in connect_all(launches):
        assert re.search(
            r"rank 1 \(process \d+ on .+\) was told that there are 3 workers, rank 0 \(process \d+ "
            r"on .+\) that there are 2; start all with the same number",
            str(outcome),
        )
        assert isinstance(outcome, DisagreementError)


def test_the_first_whose_time_is_over_names_the_missing_for_all():
    """Else those who go on waiting would take the one that gave up for the missing one."""
    store = dist.HashStore()

    def outcome(rank, deadline_s):
        with pytest.raises(CollectiveTimeoutError) as caught:
            gather_places(store, launch(rank, 3), Place.own(), deadline_s, timeout_s=0.3)
        return str(caught.value)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(outcome, 0, time.monotonic() + 60)
        while not store.check(["rank/0"]):
            time.sleep(0.001)
        messages = {2: outcome(2, time.monotonic()), 0: first.result()}
    for rank, message in messages.items():
        start = f"`init` on rank {rank} of 3: rank 1 did not come within 0.3 s; there: "
        assert message.startswith(start)


def test_a_worker_too_many_is_told(free_port):
    launches = [by_hand(0, 1, free_port), by_hand(1, 2, free_port)]
    alone, other = connect_all(launches)
    assert isinstance(alone, dist.TCPStore)
    assert isinstance(other, DisagreementError)


def test_two_workers_of_one_rank_are_named(free_port):
    outcomes = connect_all([by_hand(rank, 3, free_port) for rank in (0, 1, 1)])
    for outcome in outcomes:
        assert "two workers say that they are rank 1: process" in str(outcome)


def test_a_worker_that_came_and_was_killed_is_named():
    with subprocess.Popen(["true"]) as child:
        pass
    ended = replace(Place.own(), pid=child.pid)
    message = rf"`init` on rank 0 of 2: rank 0 \(process {child.pid} on .+\) came, and ended"
    with pytest.raises(PeerLostError, match=message):
        gather_places(dist.HashStore(), launch(0, 2), ended, time.monotonic() + 20, 20)


def test_too_few_descriptors_are_told_before_the_meeting(caplog):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = limit[1]
    free = highest - len(os.listdir("/proc/self/fd"))
    message = (
        rf"{highest} workers need about {2 * highest + 32} more open files and connections in "
        r"rank 0 on .+, and its limit allows \d+ more; raise it before the start: ulimit -Hn"
    )
    try:
        with pytest.raises(UsageError, match=message):
            check_descriptors(launch(0, highest))
        check_descriptors(launch(1, free // 6))
        check_descriptors(launch(1, free - free // 10))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    [warning] = caplog.messages
    assert "`attach` may fail" in warning


def test_workers_of_two_jobs_on_one_port_are_named(free_port):
    launches = [by_hand(0, 2, free_port), by_hand(1, 2, free_port, job_id="another")]
    for outcome in connect_all(launches):
        assert "belongs to job 'another'" in str(outcome)
        assert "set MASTER_PORT" in str(outcome)


def run(*command: str) -> list[str]:
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
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
@pytest.mark.parametrize("package", ["openmpi-bin", pytest.param("mpich", marks=pytest.mark.slow)])
def test_script_under_mpirun(package):
    mpirun = mpi.LAUNCHERS[package]
    if mpirun is None:
        pytest.skip(f"{package} is not installed")
    assert run(*mpirun, "2", sys.executable, str(SCRIPT)) == TWO


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(mpi.LAUNCHERS["mpich"] is None, reason="mpich is not installed")
def test_two_jobs_of_mpiexec_and_shells_between_meet_apart():
    """MPICH names no job; a worker may be some processes below mpiexec."""
    job = shlex.join(
        [*(mpi.LAUNCHERS["mpich"] or []), "2", "sh", "-c", f"{sys.executable} {SCRIPT}; :"]
    )
    assert sorted(run("sh", "-c", f"{job} & {job} & wait")) == sorted(2 * TWO)


@pytest.mark.process
@pytest.mark.slow
def test_script_under_srun_variables(tmp_path, free_port):
    """Slurm itself is not needed: its variables are, and a first host that is this one."""
    script = tmp_path / "start.sh"
    script.write_text(
        f"""
        export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NODEID=0
        export SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2 MASTER_PORT={free_port}
        SLURM_PROCID=1 SLURM_LOCALID=1 {sys.executable} {SCRIPT} &
        SLURM_PROCID=0 SLURM_LOCALID=0 {sys.executable} {SCRIPT} && wait $!
        """
    )
    assert run("sh", str(script)) == TWO


@pytest.mark.process
def test_master_port_is_free_after_close(tmp_path, free_port):
    """Torch's own groups, made there later, would read what an earlier one of them has left."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import sys
import allstep
from torch.distributed import TCPStore
with allstep.init(device="cpu", timeout_s=90) as comm:
    rank = comm.rank
if rank == 0:
    TCPStore("127.0.0.1", {free_port}, is_master=True, wait_for_workers=False)
with allstep.init(device="cpu", timeout_s=90) as comm:
    sys.stdout.write(f"{{comm.all_gather_object(comm.rank)}}\\n")  # a line in one piece
"""
    )
    start = tmp_path / "start.sh"
    start.write_text(
        f"""
        export MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2
        RANK=1 LOCAL_RANK=1 {sys.executable} {script} &
        RANK=0 LOCAL_RANK=0 {sys.executable} {script} && wait $!
        """
    )
    assert run("sh", str(start)) == 2 * ["[0, 1]"]


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
        killed = rf"rank 1 \(process {workers.pids[1]} on {socket.gethostname()}\)"
        for rank in (0, 2):
            message = pickle.loads((workers.folder / f"rank-{rank}.pickle").read_bytes()).value
            assert re.search(rf"{killed} closed its connection; .* then start all workers", message)
        with pytest.raises(RemoteError, match=r"on rank 1:\nit died \(exit code -9\)"):
            workers.results()
