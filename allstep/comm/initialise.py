"""`init`: makes the communicator of the workers that a launcher or a framework started."""

import atexit
import importlib
import logging
import os
import socket
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import astuple
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from weakref import ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from allstep.comm.agreement import agree
from allstep.comm.communicator import Communicator
from allstep.comm.failures import explained, translated
from allstep.comm.gather_places import gather_places
from allstep.comm.group import Topology
from allstep.comm.group_wire import GroupWire, backend_name
from allstep.comm.interfaces import choose_interface
from allstep.comm.missing import RankNames
from allstep.comm.places import Place, check_own_devices
from allstep.comm.rendezvous import Rendezvous
from allstep.comm.work import ThreadWork, check_timeout
from allstep.device import HIDE_ACCELERATORS, default_device, is_accelerator, set_current_device
from allstep.device import num_devices as count_devices
from allstep.env import (
    Launch,
    allow_messages_in_turn,
    make_room,
    patient_threads,
    read_launch,
    read_run_dir,
)
from allstep.errors import CommunicationError, UsageError

_GRACE_S = 0.5
_AT_EXIT_S = 5.0  # time for other threads' calls to end
_MOMENT_S = 0.005
_meetings = count()  # number of the meeting: the same on all workers, as all call `init` equally
_stores: dict[Launch, TCPStore] = {}  # [Note: one store]


def init(
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    run_dir: Path | str | None = None,
) -> Communicator:
    """The communicator of all workers that torchrun, srun or mpirun started, or of one process.

    A process group that a framework has made is used as it is. Otherwise torch.distributed is
    initialised, so that torch's own calls work too; a single process needs no server.

    Args:
        process_group: the workers' group if another library has made it; may be a DeviceMesh of
            one dimension. None takes torch.distributed's group if it is initialised.
        device: the device that this worker computes on; None for its share of the GPUs, or the CPU
            if there are none.
        timeout_s: timeout of every call.
        run_dir: folder in which this worker records its last state, for `allstep why`; None for
            the folder of `allstep launch --run-dir`, if there is one.

    Returns:
        This worker's communicator; `close` it, or use it in a `with`.

    Raises:
        UsageError: if an argument is wrong, or the launcher's variables contradict each other.
        DisagreementError: if workers compute on different kinds of device.
        CollectiveTimeoutError: if not all workers arrive within `timeout_s`.

    >>> with init(device="cpu") as comm:
    ...     comm.size
    1
    """
    check_timeout(timeout_s)
    if process_group is None and dist.is_initialized():
        process_group = dist.distributed_c10d._get_default_group()
    joins = False
    if process_group is not None:
        comm = _join_group(_group_of(process_group), device, timeout_s)
    else:
        launch = read_launch()
        joins = launch.joins
        if launch.launcher == "none" or joins:
            comm = Communicator.single_process(choose_device(device, 0, 1), timeout_s)
        else:
            comm = _join_launch(launch, device, timeout_s)
    set_up_logging(comm.rank)
    run_dir = run_dir or read_run_dir()
    if run_dir is not None:
        comm.keep_last_state(run_dir, waits=joins)
    return comm


def _group_of(process_group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise UsageError(
                f"`process_group` is a DeviceMesh of {process_group.ndim} dimensions "
                f"{process_group.mesh_dim_names or ''}; pass one of them, such as mesh['dp']."
            )
        return process_group.get_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise UsageError(
            f"`process_group` is a {type(process_group).__name__}; pass a process group of "
            "torch.distributed whose member this process is, or a DeviceMesh."
        )
    return process_group


def _join_group(
    group: dist.ProcessGroup, device: torch.device | str | None, timeout_s: float
) -> Communicator:
    """A communicator over an existing process group."""
    unknown = Topology(0, 1, 0, 1)
    own = device_of_group(group, device)
    if own is not None:
        # Otherwise all ranks of a group without Gloo would exchange their places on accelerator 0.
        set_current_device(own)
        if device is None or str(device) == own.type:
            device = own
    wire = GroupWire(group, timeout_s)
    probe = Communicator(wire, unknown, torch.device("cpu"))
    places = [Place(*place) for place in probe.all_gather_object(astuple(Place.own()))]
    topology = Topology.from_nodes([place.host for place in places], group.rank())
    device = choose_device(device, topology.local_rank, topology.local_size)
    wire.names = RankNames.of(group, places)
    comm = Communicator(wire, topology, device)
    _check_devices(comm)
    return comm


def device_of_group(
    group: dist.ProcessGroup, device: torch.device | str | None
) -> torch.device | None:
    """The accelerator of this rank as far as it is known without communication; None if unknown.

    Args:
        group: a framework's group, which may be bound to a device.
        device: the device that the user requested.
    """
    with suppress(RuntimeError, TypeError):  # `choose_device` raises the error
        wanted = None if device is None else torch.device(device)
        if wanted is not None and wanted.index is not None and is_accelerator(wanted):
            return wanted
    bound: torch.device | None = group.bound_device_id
    return bound if bound is not None and is_accelerator(bound) else None


def _join_launch(
    launch: Launch, device: torch.device | str | None, timeout_s: float
) -> Communicator:
    """Initialises torch.distributed for the launcher's variables.

    This runs in a thread, because the backend may wait longer than its timeout.
    """
    # Its functions keep the default group at the time of their import as a default argument, and an
    # optimizer's first step imports them: the group would outlive `close`, and with it threads that
    # abort the process when the interpreter ends. So import them before there is a group.
    importlib.import_module("torch.distributed.nn.functional")
    device = choose_device(device, launch.local_rank, launch.local_size)
    check_descriptors(launch)
    rendezvous = Rendezvous(launch, timeout_s)
    meeting = ThreadWork.start(partial(_meet, launch, device, timeout_s, rendezvous), "`init`")
    try:
        names = meeting.wait(timeout_s + _GRACE_S)
    except (CommunicationError, UsageError) as error:
        if isinstance(error, CommunicationError) and not meeting.is_completed():
            raise rendezvous.late() from None
        if launch.rank == 0:
            time.sleep(_GRACE_S)  # the others read the error from the store that is served here
        raise
    finally:
        rendezvous.close()
    group = dist.distributed_c10d._get_default_group()
    topology = Topology(launch.local_rank, launch.local_size, launch.node_rank, launch.num_nodes)
    if launch.launcher not in ("torchrun", "slurm") and launch.num_nodes > 1:
        topology = Topology.from_nodes([place.host for place in names.places], launch.rank)
    wire = GroupWire(group, timeout_s, partial(_destroy, rendezvous), names)
    wire.timeout_s = timeout_s  # also sets that of an accelerator's backend; see `backend_timeout`
    comm = Communicator(wire, topology, device)
    atexit.register(_close_at_exit, ref(comm), os.getpid())
    _check_devices(comm)
    return comm


def _close_at_exit(comm_ref: "ref[Communicator]", pid: int) -> None:
    """Closes the communicator of a script that has not done so, maybe because of an error.

    Otherwise the backend's threads, which release objects and return to Python while the
    interpreter ends, would abort the process. In a forked process it does nothing.
    """
    comm = comm_ref()
    if comm is None or comm.process_group is None or os.getpid() != pid:
        return
    if getattr(sys, "last_value", None) is None:
        comm.close()
    else:
        comm.abort()
    deadline_s = time.monotonic() + _AT_EXIT_S
    while comm.activity.oldest_call() is not None and time.monotonic() < deadline_s:
        time.sleep(_MOMENT_S)


def check_descriptors(launch: Launch) -> None:
    """Raises the limit of file descriptors for the connections between workers, if necessary.

    [Note: descriptors] A group of n workers needs n + 4 descriptors on each rank, and its store
    2 n + 13 on rank 0. `attach` makes two groups, and shared memory needs one descriptor for each
    worker of this node.

    Raises:
        UsageError: if the system does not allow as many as `init` needs.
    """
    serves = launch.rank == 0 and not launch.has_store
    needed = launch.size + 16 + (launch.size + 16 if serves else 0)
    attached = needed + 2 * launch.size + launch.local_size + 64
    room = make_room(attached)
    if room >= attached:
        return
    words = (
        f"{launch.size} workers need about {{}} more open files and connections in rank "
        f"{launch.rank} on {socket.gethostname()}, and its limit allows {room} more; raise it "
        "before the start: ulimit -Hn 65536 and ulimit -n 65536, LimitNOFILE= of a systemd unit, "
        "--ulimit nofile= of docker run"
    )
    if room < needed:
        raise UsageError(f"{words.format(needed)}.")
    logging.getLogger("allstep").warning("%s. `attach` may fail.", words.format(attached))


def _meet(
    launch: Launch, device: torch.device, timeout_s: float, rendezvous: Rendezvous
) -> RankNames:
    """Finds the other workers and connects to them."""
    with translated("init", launch.rank, launch.size, timeout_s):
        served = _stores.get(launch) or rendezvous.connect()
        served.set_timeout(timedelta(seconds=timeout_s))
        # Each meeting has a prefix, so that none reads another's keys.
        run = "" if launch.min_workers is None else f"{launch.job_id}/"  # a store may serve several
        store = PrefixStore(f"allstep/init/{run}{launch.attempt}/{next(_meetings)}", served)
        rendezvous.doing = "the store of the workers does not answer; rank 0 may have stopped"
        places = gather_places(store, launch, Place.own(device), rendezvous.deadline_s, timeout_s)
        rendezvous.doing = "all workers came, but not all said by which address they are reached"
        _stores[launch] = served  # only now: after a failed meeting the next one connects anew
        choose_interface(store, launch, places, rendezvous.deadline_s)
    names = RankNames(range(launch.size), launch.rank, launch.size, store, places)
    # [Note: elastic workers on a GPU]
    backend = backend_name(device) if launch.min_workers is None else None
    if backend is not None:
        check_own_devices(places)
        allow_messages_in_turn()
    rendezvous.doing = "all workers came, but could not connect with each other"
    # [Note: Gloo's threads] NCCL's threads are not concerned.
    threads = nullcontext() if backend else patient_threads()
    with explained("init", names, timeout_s), threads:
        dist.init_process_group(
            f"cpu:gloo,{device.type}:{backend}" if backend else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if backend else None,
        )
    return names


def _check_devices(comm: Communicator) -> None:
    cure = "Pass `device` so that all workers compute on the same kind."
    agree(comm, f"compute on {comm.device.type}", cure=cure)


def _destroy(rendezvous: Rendezvous, is_aborted: bool) -> None:
    """Destroys the default group that `init` has made, unless the user already has."""
    rendezvous.leave_master_port()
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device(
    device: torch.device | str | None, local_rank: int, local_size: int
) -> torch.device:
    """The device of a worker; an accelerator becomes the process's current one.

    Args:
        device: the device that the user requested; None for an accelerator if there is one; "cuda"
            without an index for the GPU whose index is the local rank, or the only visible one.
        local_rank, local_size: this worker's number on its node, and the number of workers there.
    """
    if device is None:
        device = default_device()
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"`device` (={device!r}) is no device; pass 'cpu' or torch's name of a GPU."
        ) from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    if backend_name(chosen) is None:
        raise UsageError(
            f"`device` (={device!r}) is not supported; torch has no backend for it; pass 'cpu'."
        )
    num_devices = count_devices()
    if not num_devices:
        raise UsageError(
            f"`device` (={device!r}): this process sees no GPU; leave `device` out, or pass 'cpu'."
        )
    # Slurm's `--gpus-per-task=1` and containers show each process only its own GPU.
    usual = 0 if num_devices == 1 else local_rank
    index = usual if chosen.index is None else chosen.index
    if index >= num_devices:
        raise UsageError(
            f"`device` (={device!r}): local rank {local_rank} of {local_size} needs GPU {index}, "
            f"but this process sees {num_devices}; start at most {num_devices} workers here, pass "
            f"device='cpu', or {HIDE_ACCELERATORS}."
        )
    chosen = torch.device(chosen.type, index)
    set_current_device(chosen)
    return chosen


def set_up_logging(rank: int) -> None:
    """Shows rank 0's log messages, unless the program has configured logging itself."""
    logger = logging.getLogger("allstep")
    if rank == 0 and not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("allstep: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
