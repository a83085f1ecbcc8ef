"""The address by which each host is reached: found, not asked for."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from allstep.comm.interfaces import choose_interface
from allstep.comm.places import Place
from allstep.comm.rendezvous import Rendezvous
from allstep.env import Launch
from allstep.errors import AllstepError, UsageError
from tests.helpers.named_hosts import NamedHosts, named_hosts, torchrun
from tests.helpers.ports import free_port

SCRIPT = Path(__file__).with_name("script.py")
ROOT = SCRIPT.parents[2]
ENVIRON = {
    **{name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"},
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}
TWO = "size=2 total=3 places=[(0, 1, 0, 2), (0, 1, 1, 2)] alone=1"


@pytest.fixture(scope="module")
def hosts() -> Iterator[NamedHosts]:
    with named_hosts() as made:
        yield made


def run_torchrun(hosts: NamedHosts, *flags: object, **environ: str) -> list[tuple[int, str]]:
    commands = [
        torchrun("--nnodes", 2, "--nproc-per-node", 1, "--node-rank", host, *flags, SCRIPT)
        for host in (0, 1)
    ]
    return hosts.outputs(commands, timeout_s=200, env=ENVIRON | environ)


@pytest.mark.net
@pytest.mark.process
@pytest.mark.timeout(600)
class TestTwoHosts:
    @pytest.mark.slow
    def test_torchrun_where_host_names_are_loopback(self, hosts: NamedHosts) -> None:
        """Gloo by itself would take 127.0.1.1 (the control); rank 0 is named, too."""
        code = "import socket; print(socket.gethostbyname(socket.gethostname()))"
        assert hosts.run(0, "python3", "-c", code).strip() == "127.0.1.1"
        outcomes = run_torchrun(hosts, "--master-addr", "alpha", "--master-port", 29511)
        assert [code for code, _ in outcomes] == [0, 0], outcomes
        assert TWO in outcomes[0][1]

    @pytest.mark.slow
    def test_torchrun_with_an_address(self, hosts: NamedHosts) -> None:
        outcomes = run_torchrun(hosts, "--master-addr", "10.78.0.1", "--master-port", 29512)
        assert [code for code, _ in outcomes] == [0, 0], outcomes
        assert TWO in outcomes[0][1]

    def test_what_is_wrong_is_named_on_both_hosts(self, hosts: NamedHosts) -> None:
        command = [sys.executable, __file__]
        variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        lines = [["env", f"RANK={rank}", *command] for rank in (0, 1)]
        outcomes = hosts.outputs(lines, timeout_s=500, env=ENVIRON | variables)
        for code, text in outcomes:
            assert code == 0, text
            found = json.loads(text.splitlines()[-1])
            assert found["control"] == "eth0"
            assert "GLOO_SOCKET_IFNAME (=lo)" in found["loopback"]
            assert "127.0.0.1" in found["loopback"] and "unset it" in found["loopback"]
            known = r"GLOO_SOCKET_IFNAME \(=eth9\) of rank 0 .* it has: .*eth0 \(10.78.0.1\)"
            assert re.search(known, found["unknown"])
            if found["firewall"] is not None:
                assert re.search(
                    r"rank 0 \(process \d+ on alpha, 10.78.0.1 on eth0\) can't reach rank 1 "
                    r"\(process \d+ on beta\) at 10.78.0.2 .*: a firewall .*GLOO_SOCKET_IFNAME",
                    found["firewall"],
                )


def try_settings() -> None:
    """What each host's worker runs: `init` with several settings, one after the other."""
    import allstep

    rank = int(os.environ["RANK"])

    def outcome(port: int, **variables: str) -> str:
        environ = {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": str(port), **variables}
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        os.environ.update(environ)
        try:
            with allstep.init(device="cpu", timeout_s=120) as comm:
                comm.barrier()
        except AllstepError as error:
            return str(error)
        return os.environ["GLOO_SOCKET_IFNAME"]

    found: dict[str, str | None] = {"control": outcome(29521)}
    found["loopback"] = outcome(29522, GLOO_SOCKET_IFNAME="lo")
    found["unknown"] = outcome(29523, GLOO_SOCKET_IFNAME="eth9" if rank == 0 else "eth0")
    has_firewall = rank == 0 or _refuse_visitors()
    found["firewall"] = outcome(29524)
    if not has_firewall or found["firewall"] == "eth0":
        found["firewall"] = None
    print(json.dumps(found))


def _refuse_visitors() -> bool:
    """beta answers what it asked for, and lets nobody in: the store works, Gloo would not."""
    rules = "add table inet t; add chain inet t in { type filter hook input priority 0; }; "
    rules += "add rule inet t in ct state new tcp flags syn iifname eth0 reject"
    try:
        return subprocess.run(["nft", rules], check=False).returncode == 0
    except FileNotFoundError:
        return False


def launch(rank: int, **changes: object) -> Launch:
    fields = {"launcher": "torchrun", "size": 2, "local_rank": 0, "local_size": 1}
    fields |= {"node_rank": rank, "num_nodes": 2, "master_addr": "127.0.0.1", "job_id": "a"}
    return Launch(rank=rank, **({"master_port": 29500} | fields | changes))  # type: ignore[arg-type]


def choices(*spaces: str) -> list[str | None]:
    """What the workers of some machines come to whose way to rank 0 is loopback."""
    store = dist.HashStore()
    places = [Place(f"host{rank}", 7, f"{space} 1") for rank, space in enumerate(spaces)]

    def choose(rank: int) -> str | None:
        try:
            choose_interface(store, launch(rank), places, time.monotonic() + 60)
        except UsageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor() as pool:
        return list(pool.map(choose, range(len(spaces))))


def test_workers_of_one_machine_are_left_alone() -> None:
    assert choices("boot", "boot") == [None, None]
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_tunnel_to_rank_0_is_no_address() -> None:
    for error in choices("one boot", "another"):
        assert error is not None
        assert "rank 1 (process 7 on host1) reaches rank 0" in error and "tunnel" in error
        assert "Set MASTER_ADDR" in error


def test_a_launchers_store_that_is_loopback_on_another_node_is_refused_at_once() -> None:
    second = launch(1, master_port=free_port(), has_store=True, master_addr="localhost")
    message = r"MASTER_ADDR \(='localhost'\) is 127.0.0.1 on .*, its own loopback.*--local-addr"
    with pytest.raises(UsageError, match=message):
        Rendezvous(second, 60).connect()


if __name__ == "__main__":
    try_settings()
