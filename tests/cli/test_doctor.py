"""`allstep doctor`: faults that are planted are named, and nothing else."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from allstep.cli.doctor import FOUND
from allstep.cli.doctor_faults import find_faults
from allstep.cli.links_picture import draw_links
from allstep.cli.main import main
from allstep.cli.probe_machine import measure_disk
from tests.helpers.named_hosts import NamedHosts, named_hosts

ROOT = Path(__file__).parents[2]
CORES = {str(core): [1e-3, "a1"] for core in range(4)}
SOUND: dict[str, Any] = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "allstep": "0.1.0",
    "code": "abc",
    "name_address": "10.0.0.1",
    "skew_s": 0.01,
    "num_descriptors": 1000,
    "stack_bytes": 8 << 20,
    "num_processes": None,
    "locked_bytes": None,
    "shared_bytes": 8 << 30,
    "is_port_taken": False,
    "disk_bytes_per_s": 1e8,
    "cores": CORES,
}
LINK = {"error": "", "is_large_lost": False, "latency_s": 1e-4, "rate_bps": 9e8, "loss": 0.0}
LINK |= {"own": "10.0.0.1", "seen": "10.0.0.1"}
GPU = {"kind": "H100", "time_s": 1e-3, "num_wrong": 0, "slowed_by": []}
GPU |= {"num_memory_errors": 0, "has_bad_rows": False}
HOSTS = ("alpha", "beta", "gamma")


def faults(
    beta: dict[str, Any] | None = None, links: dict[tuple[str, str], dict[str, Any]] | None = None
) -> list[tuple[str, str]]:
    """What is found if beta, or some links, differ from sound ones."""
    readings = {host: SOUND | ((beta or {}) if host == "beta" else {}) for host in HOSTS}
    pairs = {(one, other): LINK for one in HOSTS for other in HOSTS if one != other}
    pairs |= {pair: LINK | changed for pair, changed in (links or {}).items()}
    return [(f.fault, f.where) for f in find_faults(readings, pairs, num_workers=16)]


def test_sound_hosts_have_no_faults() -> None:
    assert faults() == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"name_address": "127.0.1.1"}, "name is loopback"),
        ({"num_descriptors": 100}, "limit of open files"),
        ({"stack_bytes": 64 << 10}, "limit of stacks"),
        ({"num_processes": 100}, "limit of processes"),
        ({"shared_bytes": 64 << 20}, "shared memory"),
        ({"skew_s": 30.0}, "clock"),
        ({"disk_bytes_per_s": 1e6}, "slow disk"),
        ({"torch": "2.12.0"}, "versions"),
        ({"code": "abd"}, "versions"),
        ({"cores": CORES | {"2": [4e-3, "a1"]}}, "slow core"),
        ({"cores": CORES | {"3": [1e-3, "ff"]}}, "lying core"),
        ({"cores": {"0": [9e-3, "a1"], "1": [1e-3, "a1"]}}, "slow core"),
        ({"locked_bytes": 8 << 20}, "limit of locked memory"),
        ({"gpus": [GPU, GPU | {"num_wrong": 3}]}, "lying GPU"),
        ({"gpus": [GPU, GPU | {"time_s": 2e-3}]}, "slow GPU"),
        ({"gpus": [GPU | {"slowed_by": ["heat (hardware)"]}]}, "slowed GPU"),
        ({"gpus": [GPU | {"num_memory_errors": 2}]}, "memory errors"),
        ({"gpus": [GPU | {"has_bad_rows": True}]}, "memory errors"),
        ({"gpus": [GPU, GPU], "wrong_copies": [[0, 1, "zeros"]]}, "copies between GPUs"),
        ({"stuck": "a copy from GPU 0 to GPU 1"}, "copies between GPUs"),
        ({"stuck": "the start of CUDA"}, "stuck GPU"),
        ({"error": "a matrix product on GPU 1: an illegal memory access"}, "failed GPU"),
        ({"missing": "the GPUs: torch is built without them"}, "not looked at"),
        ({"driver": "580.1"}, "versions"),
    ],
)
def test_a_fault_of_a_host_is_named(changed: dict[str, Any], fault: str) -> None:
    assert faults(changed) == [(fault, "beta")]


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"error": "timed out"}, "unreachable"),
        ({"is_large_lost": True, "rate_bps": None, "loss": None}, "MTU"),
        ({"loss": 0.05}, "packet loss"),
        ({"seen": "10.0.0.254"}, "NAT"),
    ],
)
def test_a_fault_of_a_link_is_named(changed: dict[str, Any], fault: str) -> None:
    assert faults(links={("alpha", "gamma"): changed}) == [(fault, "alpha to gamma")]


def test_a_slow_port_is_named_and_a_slow_link_to_it_is_not() -> None:
    slow = {"rate_bps": 9e7}
    links = {("beta", "alpha"): slow, ("beta", "gamma"): slow, ("alpha", "beta"): slow}
    assert faults(links=links) == [("slow port", "beta")]


def test_gpus_of_other_kinds_may_be_slower() -> None:
    assert faults({"gpus": [GPU, GPU | {"kind": "L4", "time_s": 1e-2}]}) == []


def test_another_order_of_the_hosts_is_proposed_where_its_ring_is_faster() -> None:
    slow = {"rate_bps": 1e8}
    pairs = [(one, other) for one in HOSTS for other in HOSTS if one != other]
    links = dict.fromkeys(zip(HOSTS, (*HOSTS[1:], HOSTS[0]), strict=True), slow)
    readings = dict.fromkeys(HOSTS, SOUND)
    found = find_faults(readings, {p: LINK | links.get(p, {}) for p in pairs}, num_workers=3)
    assert [(f.fault, f.where) for f in found] == [("order of the hosts", "alpha, beta, gamma")]
    assert found[0].cure.startswith("give the hosts in the order alpha,gamma,beta;")


def test_a_picture_of_the_links(tmp_path: Path) -> None:
    links = {("alpha", "beta"): LINK, ("beta", "alpha"): LINK | {"latency_s": None}}
    draw_links(tmp_path / "links.png", links)
    assert (tmp_path / "links.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_of_one_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plot", "links.png"]) == 2
    assert "`plot` draws links between hosts, and there is one" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--workers=0", "--model-bytes=-1", "--port=0", "--port=70000"])
def test_a_number_that_can_not_be_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", flag]) == 2
    name, _, value = flag.removeprefix("--").partition("=")
    assert f"error: `{name.replace('-', '_')}` (={value})" in capsys.readouterr().err


def test_the_exit_code_and_json_of_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        code = main(["doctor", "--json", "--port", port])
    assert code == 2
    read = json.loads(capsys.readouterr().out)
    assert "port taken" in [finding["fault"] for finding in read["findings"]]
    [host] = read["hosts"].values()
    assert len(host["cores"]) == len(os.sched_getaffinity(0))


def test_a_folder_that_cannot_be_written_is_a_slow_disk(tmp_path: Path) -> None:
    assert measure_disk(tmp_path / "missing") == 0


@pytest.mark.net
@pytest.mark.process
def test_limits_and_shared_memory_are_read_from_the_system() -> None:
    plant = "mount -t tmpfs -o size=1m tmpfs /dev/shm && ulimit -n 64 && ulimit -s 512 && "
    command = f"{plant} exec {sys.executable} -m allstep doctor --json"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 2, done.stderr
    named = {finding["fault"] for finding in json.loads(done.stdout)["findings"]}
    assert {"limit of open files", "limit of stacks", "shared memory"} <= named


TRAIN = ("train", "digits", "--epochs", "1", "--width", "4", "--log-every-steps", "1000")


def test_a_training_looks_at_a_sound_host_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, "--run-dir", str(tmp_path / "run"), "--doctor", "quick"]) == 0
    assert (tmp_path / "run" / "report.json").exists()
    assert "`doctor`" not in capsys.readouterr().err


def test_a_training_is_refused_on_a_host_whose_folder_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path("/proc/runs/first")  # not even by root
    assert main([*TRAIN, "--run-dir", str(run_dir), "--doctor", "quick"]) == FOUND
    printed = capsys.readouterr().err
    assert f"  {os.uname().nodename}: slow disk: 0.00 MB/s" in printed
    assert "    cure: another --run-dir" in printed


@pytest.mark.process
def test_a_training_is_refused_where_the_port_of_rank_0_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        srun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-m", "allstep", *TRAIN, "--doctor", "quick"],
            cwd=tmp_path,
            env=os.environ | srun | {"MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == FOUND, done.stderr
    assert "127.0.0.1: port taken: another program listens" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.net
@pytest.mark.process
@pytest.mark.slow
def test_workers_of_a_launcher_are_refused_by_the_host_that_has_a_fault(tmp_path: Path) -> None:
    """One of two has a low limit of processes; both end, and the run's folder stays free."""
    run_dir = tmp_path / "run"
    train = [*TRAIN, "--run-dir", run_dir, "--doctor", "quick"]
    environ = ["env", "WORLD_SIZE=2", "MASTER_ADDR=10.78.0.1", "MASTER_PORT=29500"]
    python = [sys.executable, "-m", "allstep", *train]
    few = ["prlimit", "--nproc=100", *python]
    commands = [
        [*environ, f"RANK={rank}", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", *command]
        for rank, command in enumerate((python, few))
    ]
    with named_hosts() as two:
        ended = two.outputs(commands, timeout_s=200, cwd=ROOT)
        assert [code for code, _ in ended] == [FOUND, FOUND], ended
        assert "beta (rank 1): limit of processes: 100 processes" in ended[0][1]
        assert "alpha" not in ended[0][1]
    assert main([*TRAIN, "--run-dir", str(run_dir)]) == 0


@pytest.fixture(scope="module")
def hosts() -> Iterator[NamedHosts]:
    with named_hosts(3) as made:
        yield made


def examine(
    hosts: NamedHosts, folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, set[tuple[str, str]]]:
    """Exit code and faults of the three hosts; a script stands for ssh, which others test."""
    cases = "\n".join(
        f"{name}) host={namespace} address={address};;"
        for name, namespace, address in zip(
            hosts.names, hosts.namespaces, hosts.addresses, strict=True
        )
    )
    script = folder / "ssh"
    script.write_text(
        f'#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\ncase "$2" in\n{cases}\nesac\n'
        'export SSH_CONNECTION="10.78.0.9 1 $address 22"\n'
        'exec ip netns exec "$host" unshare --uts sh -c "hostname $2; $3"\n'
    )
    script.chmod(0o755)
    line = ["doctor", "--hosts", "alpha,beta,gamma", "--ssh", str(script), "--json"]
    code = main([*line, "--remote-dir", str(ROOT)])
    findings = json.loads(capsys.readouterr().out)["findings"]
    # What a machine has that others use, too, and how fast, is no test.
    others = ("slow core", "slow disk", "shared memory", "order of the hosts")
    is_noisy = any(f["fault"] in others for f in findings)
    found = {(f["fault"], f["where"]) for f in findings if f["fault"] not in others}
    has_cure = any(f["cure"] for f in findings if f["fault"] not in others)
    assert is_noisy or code == (FOUND if has_cure else 0)
    return FOUND if has_cure else 0, found


@pytest.mark.net
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_faults_of_a_network_are_named_and_none_of_a_sound_one(
    hosts: NamedHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loopback = {("name is loopback", name) for name in hosts.names}
    assert examine(hosts, tmp_path, capsys) == (0, loopback)
    alpha, beta, gamma = hosts.addresses
    rules = {
        0: f"ip saddr {gamma} meta l4proto udp numgen random mod 5 == 0 drop",
        1: f"ip saddr {alpha} ct state new tcp flags syn drop",
        2: f"ip saddr {beta} ip length > 1000 drop",
    }
    chain = "add table inet t; add chain inet t in { type filter hook input priority 0; }; "
    shape = ("rate", "20mbit", "burst", 32768, "latency", "100ms")
    chains = {host: f"{chain} add rule inet t in {rule}" for host, rule in rules.items()}
    with planted(hosts, chains):
        hosts.run(2, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape)
        try:
            code, found = examine(hosts, tmp_path, capsys)
        finally:
            hosts.run(2, "tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo")
    assert code == 2
    assert found - loopback == {
        ("packet loss", "gamma to alpha"),
        ("packet loss", "alpha to gamma"),  # the answers
        ("unreachable", "alpha to beta"),
        ("MTU", "beta to gamma"),
        ("slow port", "gamma"),
    }


@pytest.mark.net
@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_translated_address_is_named(
    hosts: NamedHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = "add table ip t; add chain ip t out { type nat hook postrouting priority 100; }; "
    other = ("10.78.0.200/24", "dev", "eth0")
    rule = f"ip daddr {hosts.addresses[2]} snat to 10.78.0.200"
    with planted(hosts, {0: f"{chain} add rule ip t out {rule}"}):
        hosts.run(0, "ip", "address", "add", *other)
        try:
            _, found = examine(hosts, tmp_path, capsys)
        finally:
            hosts.run(0, "ip", "address", "delete", *other)
    assert {where for fault, where in found if fault == "NAT"} == {"alpha to gamma"}


@contextmanager
def planted(hosts: NamedHosts, rules: dict[int, str]) -> Iterator[None]:
    """Hosts with rules of nftables; skips where there are none."""
    try:
        for host, rule in rules.items():
            try:
                hosts.run(host, "nft", rule)
            except (AssertionError, FileNotFoundError) as error:
                pytest.skip(f"no nftables: {error}")
        yield
    finally:
        for host in rules:
            with suppress(AssertionError, FileNotFoundError):
                hosts.run(host, "nft", "flush ruleset")
