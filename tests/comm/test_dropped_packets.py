"""Links that swallow every packet, with no reset: as a cable that is pulled, or a firewall."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import allstep
from allstep import Communicator, Stale, Synchronous
from allstep.env import read_launch
from allstep.errors import CommunicationError

TIMEOUT_S = 4
POLICIES = {
    "default": Synchronous(),
    "ring": Synchronous(algorithm="ring"),
    "late": Stale(algorithm="native"),
}
SLOW = [pytest.param(when, marks=pytest.mark.slow) for when in ("init", "ring", "late", "barrier")]


@pytest.mark.net
@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["default", *SLOW])
def test_every_wait_ends_in_time_where_packets_are_dropped(when: str, tmp_path: Path) -> None:
    from benchmarks.network import ShapedHosts, UnavailableError

    try:
        with ShapedHosts(2, rate_bps=1e9) as hosts:
            hosts.run([sys.executable, __file__, tmp_path, when], timeout_s=100)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    for rank in range(2):
        kind, message = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert f"on rank {rank} of 2" in message
        assert kind == "CollectiveTimeoutError", message
        assert f"within {TIMEOUT_S} s" in message


def drop_packets() -> None:
    """All that this host sends, from now on."""
    drop = ["tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo", "limit", "0"]
    subprocess.run(drop, check=True)


def train(comm: Communicator, policy: allstep.ExchangePolicy) -> None:
    """Packets are dropped in the middle of it."""
    model = nn.Linear(300, 300)
    allstep.attach(model, comm, policy)
    for step in range(10):
        model(torch.ones(2, 300)).sum().backward()
        model.zero_grad()
        if step == 4:
            drop_packets()


def fail(when: str) -> None:
    if when == "init":
        drop_packets()
    comm = allstep.init(device="cpu", timeout_s=TIMEOUT_S)
    if when in POLICIES:
        train(comm, POLICIES[when])
    else:
        drop_packets()
        comm.barrier()


if __name__ == "__main__":
    try:
        fail(sys.argv[2])
        said = ("", "no error")
    except CommunicationError as error:
        said = (type(error).__name__, str(error))
    (Path(sys.argv[1]) / f"rank-{read_launch().rank}.json").write_text(json.dumps(said))
