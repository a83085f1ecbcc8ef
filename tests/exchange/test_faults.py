"""Workers that are killed in the middle of an exchange."""

import atexit
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from allstep.comm import Communicator
from allstep.comm.algorithms import Native
from allstep.errors import CommunicationError, PeerLostError
from allstep.exchange import Stale, Synchronous, attach
from tests.helpers.processes import names_in_dev_shm, run_processes, start_processes

POLICIES = {
    "default": Synchronous(),
    "native": Synchronous(algorithm="native"),
    "ring-int8-late": Stale(algorithm="ring", compression="int8", steps=1),
}


def exchange_for_ever(comm: Communicator, folder: str, name: str) -> None:
    """Until a peer is lost; then writes how many seconds after the kill."""
    model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(4)))
    attach(model, comm, POLICIES[name])
    x = torch.ones(2, 400)
    with pytest.raises(CommunicationError):
        for step in range(1_000_000):
            model(x).sum().backward()
            model.zero_grad()
            if step == 3:
                (Path(folder) / f"rank {comm.rank}").touch()
    waited_s = time.time() - (Path(folder) / "killed").stat().st_mtime
    (Path(folder) / f"seconds {comm.rank}").write_text(str(waited_s))


def wait_for(folder: Path, kind: str, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while len(list(folder.glob(f"{kind} *"))) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    time.sleep(0.1)


@pytest.mark.process
@pytest.mark.parametrize("name", POLICIES)
def test_killed_worker_raises_on_the_others(name: str, tmp_path: Path) -> None:
    before = names_in_dev_shm()
    with start_processes(3, exchange_for_ever, str(tmp_path), name, timeout_s=60) as workers:
        wait_for(tmp_path, "rank", 3)
        (tmp_path / "killed").touch()
        workers.kill(1)
        wait_for(tmp_path, "seconds", 2)
    assert all(float(path.read_text()) < 10 for path in tmp_path.glob("seconds *"))
    assert names_in_dev_shm() <= before


class CutInTwo(Native):
    """Rank 1 sends more than sockets hold, and is killed at once; rank 0 has half a message."""

    def _reduce_(self, flat: Tensor) -> None:
        # Longer messages are waited for in another way.
        messages = [torch.empty((1 << 24) - 4, dtype=torch.uint8) for _ in range(8)]
        if self.comm.rank == 0:
            arriving = [self._messenger.recv(message, 1) for message in messages]
            self._messenger.send(flat, 1).wait()
            for work in arriving:
                work.wait()
        else:
            self._messenger.recv(flat, 0).wait()
            for message in messages:
                self._messenger.send(message, 0)
            os.kill(os.getpid(), signal.SIGKILL)


def exchange_half(comm: Communicator, folder: str) -> None:
    model = nn.Linear(2, 2)
    attach(model, comm, Synchronous(algorithm=CutInTwo))
    with pytest.raises(PeerLostError, match=r"rank 1 \(process \d+ on .*\) closed its connection"):
        model(torch.ones(2, 2)).sum().backward()
    (Path(folder) / f"seconds {comm.rank}").touch()


@pytest.mark.process
def test_message_that_is_cut_in_two_raises_long_before_the_timeout(tmp_path: Path) -> None:
    with start_processes(2, exchange_half, str(tmp_path), timeout_s=600):
        wait_for(tmp_path, "seconds", 1)


@pytest.mark.process
def test_killed_workers_leave_no_shared_memory(tmp_path: Path) -> None:
    before = names_in_dev_shm()
    with start_processes(2, exchange_for_ever, str(tmp_path), "default", timeout_s=60) as workers:
        wait_for(tmp_path, "rank", 2)
        workers.kill()
        assert workers.join(10) == [-9, -9]
    assert names_in_dev_shm() <= before


def exchange_around_a_fork(comm: Communicator) -> float:
    model = nn.Linear(1, 1, bias=False)
    attach(model, comm)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), float(comm.rank))).sum().backward()
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                atexit._run_exitfuncs()
                os._exit(0)
            os.waitpid(child, 0)
    return float(model.weight.grad)


@pytest.mark.process
def test_forked_child_that_exits_keeps_the_exchange() -> None:
    assert run_processes(2, exchange_around_a_fork, timeout_s=30) == [0.5, 0.5]
