"""`allstep doctor`: what is wrong with hosts and the network between them, and the cure."""

import argparse
import json
import os
import queue
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from allstep.cli.host import facts_of
from allstep.cli.host_link import HostLink
from allstep.cli.hosts import split_host_options
from allstep.cli.probe_machine import is_own_name_loopback, probe_machine
from allstep.cli.probe_network import EchoServer, probe
from allstep.cli.workers import run_here
from allstep.comm import Communicator
from allstep.env import is_loopback, own_addresses, read_gloo_interface, read_launch
from allstep.errors import UsageError

FOUND = 2
_SLOW = 3.0  # times slower than the usual is a fault
_CLOCK_S = 2.0
_LOSS = 0.01
_SHARED_BYTES = 128 << 20
_STACK_BYTES = 1 << 20
_DISK_BYTES_PER_S = 5e6
_SAME = {"python": "Python", "torch": "torch", "allstep": "allstep", "code": "the code of allstep"}


@dataclass(frozen=True)
class Finding:
    """What is wrong, where, and what helps.

    Attributes:
        fault: its name, for programs.
        where: a host, or one host and another.
        what: was found.
        cure: what helps; empty if it does no harm to allstep.
    """

    fault: str
    where: str
    what: str
    cure: str


def run(arguments: list[str]) -> int:
    """Looks at this host, or at all of `--hosts` and the links between them."""
    options, rest = split_host_options(arguments)
    parser = argparse.ArgumentParser(
        prog="allstep doctor",
        description="Says what is wrong with this host, or with those of --hosts or a launcher.",
        allow_abbrev=False,
    )
    parser.add_argument("--hosts", metavar="A,B,...", help="hosts that ssh reaches")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument("--port", type=int, help="of rank 0: whether it is free on the first host")
    parser.add_argument("--workers", type=int, default=16, help="in all, for the limits")
    parser.add_argument("--model-bytes", type=int, default=0, help="of parameters, for /dev/shm")
    known = parser.parse_args(rest)
    machine = {"num_descriptors": 4 * known.workers + 96, "port": known.port, "folder": "."}
    if options is None and read_launch().size > 1:
        return run_here(partial(_look_together, known=known, machine=machine))
    if options is None:
        here = os.uname().nodename
        readings = {here: facts_of([], []) | probe_machine(**machine) | {"skew_s": 0.0}}
        links: dict[tuple[str, str], Mapping[str, Any]] = {}
    else:
        with ExitStack() as stack:
            opened = []
            for number, host in enumerate(options.hosts):
                link = HostLink(
                    number, host.name, options.ssh, options.folder, options.python, queue.Queue()
                )
                stack.callback(link.close)
                opened.append(link)
            readings = {link.name: _read_host(link, machine) for link in opened}
            links = _read_links(opened)
    return _judge(readings, links, known)


def _judge(
    readings: Mapping[str, Mapping[str, Any]],
    links: Mapping[tuple[str, str], Mapping[str, Any]],
    known: argparse.Namespace,
) -> int:
    """Prints what is wrong; returns the exit code."""
    found = find_faults(readings, links, known.workers, known.model_bytes)
    _show(found, readings, links, is_json=known.json)
    return FOUND if any(finding.cure for finding in found) else 0


def _look_together(
    comm: Communicator, known: argparse.Namespace, machine: Mapping[str, Any]
) -> int:
    """The same by a launcher's workers, one of each node; the exit code is rank 0's."""
    interface = read_gloo_interface()
    address = next((own for name, own in own_addresses() if name == interface), "127.0.0.1")
    times_s = []
    for _ in range(3):
        comm.barrier()
        times_s.append(time.time())
    with ExitStack() as stack:
        own = None
        if comm.local_rank == 0:
            server = EchoServer()
            stack.callback(server.close)
            name = f"{os.uname().nodename} (rank {comm.rank})"
            own = name, (address, *server.ports), facts_of([], []) | probe_machine(**machine)
        every = comm.all_gather_object((own, times_s))
        leaders = {rank: them[0] for rank, them in enumerate(every) if them[0] is not None}
        links = {}
        for rank, one in leaders.items():
            for other in leaders.values():
                if rank == comm.rank and other[0] != one[0]:
                    links[one[0], other[0]] = probe(*other[1])
            comm.barrier()
        seen = comm.all_gather_object([[*pair, found] for pair, found in links.items()])
    if comm.rank != 0:
        return 0
    readings = {}
    for rank, (name, _, reading) in leaders.items():
        pairs = zip(every[rank][1], every[0][1], strict=True)
        readings[name] = reading | {"skew_s": min(abs(there - here) for there, here in pairs)}
    return _judge(readings, {(one, other): f for part in seen for one, other, f in part}, known)


def _read_host(link: HostLink, machine: Mapping[str, Any]) -> dict[str, Any]:
    facts = link.ask("facts", paths=[], files=[])
    if "error" in facts:
        raise UsageError(f"`hosts`: {link.name}: {facts['error']}; install it there.")
    readings = link.ask("machine", **machine)
    skews = []
    for _ in range(3):
        before_s = time.time()
        there_s = link.ask("time")["time_s"]
        after_s = time.time()
        # Nearer to 0 by half the way there and back, which may be uneven.
        skew_s = there_s - (before_s + after_s) / 2
        skews.append(max(0.0, abs(skew_s) - (after_s - before_s) / 2))
    return facts | readings | {"skew_s": min(skews)}


def _read_links(links: Sequence[HostLink]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """(host, other) -> what the host finds when it sends to the other, a pair at a time."""
    first = links[0].ask("serve", towards=None)
    served = {}
    for link in links:
        towards = first["address"] if link is not links[0] else None
        served[link.name] = link.ask("serve", towards=towards)
    if len(links) > 1 and is_loopback(served[links[0].name]["address"]):
        served[links[0].name] = links[0].ask("serve", towards=served[links[1].name]["address"])
    return {
        (one.name, other.name): one.ask("probe", **served[other.name])
        for one in links
        for other in links
        if one is not other
    }


def find_faults(
    readings: Mapping[str, Mapping[str, Any]],
    links: Mapping[tuple[str, str], Mapping[str, Any]],
    num_workers: int,
    model_bytes: int = 0,
) -> list[Finding]:
    """What readings say is wrong; nothing is measured here.

    Args:
        readings: host -> `facts_of` and `probe_machine`, and `skew_s`, its clock's difference.
        links: (host, other) -> `probe`.
        num_workers: in all.
        model_bytes: of the parameters.
    """
    found: list[Finding] = []
    for number, (host, own) in enumerate(readings.items()):
        found += _faults_of_host(host, own, num_workers, model_bytes, is_first=number == 0)
    found += _different_versions(readings)
    found += _slow_cores(readings)
    for (one, other), link in links.items():
        found += _faults_of_link(f"{one} to {other}", other, link)
    return found + _slow_links(links)


def _faults_of_host(
    host: str, own: Mapping[str, Any], num_workers: int, model_bytes: int, *, is_first: bool
) -> list[Finding]:
    needed = 4 * num_workers + 96
    shared = _SHARED_BYTES + 4 * model_bytes
    rate = own["disk_bytes_per_s"]
    table = [
        (
            "name is loopback",
            is_own_name_loopback(own["name_address"]),
            f"its own name is {own['name_address']}; allstep finds another address by itself",
            "",
        ),
        (
            "limit of open files",
            own["num_descriptors"] < needed,
            f"{num_workers} workers need {needed} open files, {own['num_descriptors']} are allowed",
            "ulimit -Hn 65536; LimitNOFILE= of a unit; --ulimit nofile=65536 of docker run",
        ),
        (
            "limit of stacks",
            own["stack_bytes"] is not None and own["stack_bytes"] < _STACK_BYTES,
            f"threads have stacks of {own['stack_bytes']} bytes",
            "ulimit -s 8192",
        ),
        (
            "limit of processes",
            own["num_processes"] is not None and own["num_processes"] < 64 * num_workers,
            f"{own['num_processes']} processes and threads are allowed",
            "ulimit -u 65536; --pids-limit of docker run",
        ),
        (
            "shared memory",
            own["shared_bytes"] is not None and own["shared_bytes"] < shared,
            f"/dev/shm has {own['shared_bytes']} bytes left of the {shared} needed",
            "docker run --shm-size 8g, or mount -o remount,size=8g /dev/shm",
        ),
        (
            "port taken",
            is_first and own["is_port_taken"],
            "another program listens on the port of rank 0",
            "another --master-port",
        ),
        (
            "clock",
            own["skew_s"] > _CLOCK_S,
            f"its clock differs by {own['skew_s']:.1f} s from this machine's",
            "a time service: chrony or systemd-timesyncd",
        ),
        (
            "slow disk",
            rate < _DISK_BYTES_PER_S,
            f"{rate / 1e6:.2f} MB/s reach the disk (0: it is full, or can't be written)",
            "another --run-dir, or fewer checkpoints (--checkpoint-every-steps)",
        ),
    ]
    return [Finding(fault, host, what, cure) for fault, is_there, what, cure in table if is_there]


def _different_versions(readings: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    first, *_ = readings
    return [
        Finding(
            "versions",
            host,
            f"{what} {own[key]}, on {first} {readings[first][key]}",
            "install the same on all hosts",
        )
        for host, own in readings.items()
        for key, what in _SAME.items()
        if own[key] != readings[first][key]
    ]


def _slow_cores(readings: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Cores against the others of their host: another processor may round and run otherwise."""
    found = []
    for host, own in readings.items():
        cores = own["cores"]
        usual_s = statistics.median_low(time_s for time_s, _ in cores.values())
        right = statistics.mode(digest for _, digest in cores.values())
        for core, (time_s, digest) in cores.items():
            if digest != right:
                what = (
                    f"core {core} computes a matrix product wrongly (digest {digest}, not {right})"
                )
                found.append(Finding("lying core", host, what, "have the machine repaired"))
            elif time_s > _SLOW * usual_s:
                what = f"core {core} takes {time_s / usual_s:.1f} times as long as the others"
                found.append(Finding("slow core", host, what, "look at its clock and temperature"))
    return found


def _faults_of_link(where: str, other: str, link: Mapping[str, Any]) -> list[Finding]:
    if link["error"]:
        what = f"no connection to {other}: {link['error']}"
        return [Finding("unreachable", where, what, "open all TCP ports between the hosts")]
    if link["is_large_lost"]:
        what = "small messages arrive and large ones don't"
        cure = "the same MTU on hosts and switches: ip link set eth0 mtu 1500"
        return [Finding("MTU", where, what, cure)]
    if link["loss"] > _LOSS:
        what = f"{100 * link['loss']:.1f} % of the packets are lost"
        return [Finding("packet loss", where, what, "look at cable, port and duplex of both hosts")]
    return []


def _slow_links(links: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[Finding]:
    """Links against the fastest: a host's port, if all that it sends is slow."""
    rates = {pair: link["rate_bps"] for pair, link in links.items() if link["rate_bps"]}
    fastest = max(rates.values(), default=0.0)
    senders = {one for one, _ in rates}
    found = []
    for host in sorted(senders):
        best = max(rate for (one, _), rate in rates.items() if one == host)
        if best * _SLOW < fastest:
            what = f"it sends {best / 1e6:.0f} Mbit/s at most, others {fastest / 1e6:.0f}"
            found.append(Finding("slow port", host, what, "look at the speed that ethtool tells"))
    return found


def _show(
    found: Sequence[Finding],
    readings: Mapping[str, Any],
    links: Mapping[tuple[str, str], Mapping[str, Any]],
    *,
    is_json: bool,
) -> None:
    if is_json:
        pairs = [{"from": one, "to": other, **link} for (one, other), link in links.items()]
        plain = {"findings": [asdict(f) for f in found], "hosts": readings, "links": pairs}
        print(json.dumps(plain, indent=2))
        return
    for (one, other), link in links.items():
        if link["rate_bps"]:
            latency_us, rate = 1e6 * link["latency_s"], link["rate_bps"] / 1e6
            print(f"{one} to {other}: {latency_us:.0f} us there and back, {rate:.0f} Mbit/s")
    for finding in found:
        print(f"{finding.where}: {finding.fault}: {finding.what}")
        if finding.cure:
            print(f"    cure: {finding.cure}")
    if not any(finding.cure for finding in found):
        print("nothing wrong was found")
