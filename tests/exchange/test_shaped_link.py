"""What the exchange says it sent, against what the network interface says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allstep
from allstep import Synchronous

NUM_STEPS = 4
NUM_HOSTS = 3
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IP, TCP with timestamps; the interface counts them
STATISTICS = Path("/sys/class/net/eth0/statistics")


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.process
@pytest.mark.timeout(120)
def test_sent_bytes_are_those_of_the_interface(tmp_path: Path) -> None:
    from benchmarks.network import ShapedHosts, UnavailableError

    output = tmp_path / "counted.json"
    try:
        with ShapedHosts(NUM_HOSTS, rate_bps=200e6) as hosts:
            hosts.run([sys.executable, __file__, output], timeout_s=90)
    except UnavailableError as reason:
        pytest.skip(str(reason))

    num_elements = sum(p.numel() for p in make_model().parameters())
    ring_bytes = NUM_STEPS * 2 * (NUM_HOSTS - 1) / NUM_HOSTS * 4 * num_elements
    for counted in json.loads(output.read_text()):
        assert counted["stats"] == pytest.approx(counted["interface"], rel=0.03)
        assert counted["stats"] == pytest.approx(ring_bytes, rel=0.01)
        # What a ring saves: sending everything to everyone is 1.5 times as much.
        assert counted["interface"] < 0.8 * NUM_STEPS * (NUM_HOSTS - 1) * 4 * num_elements


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def interface_bytes() -> int:
    """Payload that has left this host so far."""
    count = {name: int((STATISTICS / name).read_text()) for name in ("tx_bytes", "tx_packets")}
    return count["tx_bytes"] - HEADER_BYTES * count["tx_packets"]


def count_on_a_host() -> list[Any]:
    """Bytes of some steps by both counts, of all hosts."""
    torch.set_num_threads(1)
    with allstep.init(device="cpu") as comm:
        model = make_model()
        policy = Synchronous(algorithm="ring", bucket_bytes=256 << 10)
        exchange = allstep.attach(model, comm, policy)
        x = torch.randn(2, 256)
        for _ in range(2):  # buckets are made anew after the first
            model(x).sum().backward()
        comm.barrier()
        before = interface_bytes(), exchange.stats().sent_bytes
        for _ in range(NUM_STEPS):
            model(x).sum().backward()
        comm.barrier()
        interface = interface_bytes() - before[0]
        stats = exchange.stats().sent_bytes - before[1]
        return comm.all_gather_object({"interface": interface, "stats": stats})


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(count_on_a_host()))
