"""Workers that are killed or stopped while DDP or FSDP2 exchanges by a hook of allstep's."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from allstep.comm import Communicator, init
from allstep.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from allstep.exchange import make_policy
from allstep.exchange.ddp_comm_hook import ddp_hook
from allstep.exchange.fsdp_comm_hook import fsdp_hook
from tests.helpers.processes import start_processes

TIMEOUT_S = 15.0  # a sound worker on a busy machine answers within it
POLICIES = {
    name: make_policy(algorithm="native", **changes)
    for name, changes in {
        "prompt": {},
        "late": {"staleness": 1},
        "int8": {"compression": "int8"},
    }.items()
}


def in_ddp(model: nn.Module, comm: Communicator, name: str) -> nn.Module:
    ddp = DistributedDataParallel(model, process_group=comm.process_group)
    ddp.register_comm_hook(model, ddp_hook(POLICIES[name], comm))
    return ddp


def in_fsdp(model: nn.Module, comm: Communicator, name: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("replicate", "shard"))
    replicas = init(process_group=mesh["replicate"], device="cpu", timeout_s=TIMEOUT_S)
    fully_shard(model, mesh=mesh["shard"])
    fsdp_hook(model, replicas, POLICIES[name])
    return model


def train_for_ever(
    comm: Communicator,
    folder: Path,
    wrap: Callable[[nn.Module, Communicator, str], nn.Module],
    name: str,
) -> tuple[str, str]:
    """Until another worker fails; returns the error."""
    model = wrap(nn.Sequential(*(nn.Linear(300, 300) for _ in range(3))), comm, name)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    try:
        for step in range(1_000_000):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                (folder / f"rank-{comm.rank}").touch()
    except Exception as error:
        (folder / f"failed-{comm.rank}").write_text(f"{type(error).__name__}\n{error}")
        raise
    raise AssertionError("nobody failed")


def wait_for(folder: Path, names: list[str]) -> None:
    deadline_s = time.monotonic() + 120
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    time.sleep(0.1)


@pytest.mark.process
@pytest.mark.parametrize(
    ("wrap", "name", "number"),
    [
        (in_ddp, "prompt", signal.SIGKILL),
        (in_fsdp, "late", signal.SIGKILL),
        *(
            pytest.param(wrap, name, number, marks=pytest.mark.slow)
            for wrap in (in_ddp, in_fsdp)
            for name in POLICIES
            for number in (signal.SIGKILL, signal.SIGSTOP)
        ),
    ],
)
def test_a_failed_worker_is_an_error_on_the_others(
    wrap: Callable[..., nn.Module], name: str, number: signal.Signals, tmp_path: Path
) -> None:
    error: type[CommunicationError] = PeerLostError
    if number == signal.SIGSTOP:
        error = CollectiveTimeoutError
    with start_processes(3, train_for_ever, tmp_path, wrap, name, timeout_s=TIMEOUT_S) as workers:
        wait_for(tmp_path, [f"rank-{rank}" for rank in range(3)])
        workers.kill(1, signal_number=number)
        wait_for(tmp_path, ["failed-0", "failed-2"])
        told = [(tmp_path / f"failed-{rank}").read_text() for rank in (0, 2)]
        assert any(error.__name__ in message for message in told), told
        for message in told:
            # Who gives up first closes its connections, maybe before the other's time is over.
            assert error.__name__ in message or PeerLostError.__name__ in message, message
            assert "rank 1" in message
