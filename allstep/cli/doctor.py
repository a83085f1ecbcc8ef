"""`allstep doctor`: finds faults of hosts and of the network between them, and their cures."""

import argparse
import os
import queue
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from allstep.cli.doctor_faults import Finding, descriptors_needed, find_faults
from allstep.cli.doctor_together import read_together
from allstep.cli.host import facts_of
from allstep.cli.host_link import HostLink, open_links
from allstep.cli.hosts import split_host_options
from allstep.cli.links_picture import draw_links
from allstep.cli.output_files import check_plot, writing_errors
from allstep.cli.probe_machine import probe_machine
from allstep.cli.probe_network import EchoServer, check_port, probe
from allstep.cli.rows import print_json
from allstep.cli.workers import run_here
from allstep.comm import Communicator
from allstep.env import is_loopback, own_addresses, read_gloo_interface, read_launch
from allstep.errors import UsageError, check_integer

FOUND = 2


def run(arguments: list[str]) -> int:
    """Examines this host, or all `--hosts` and the links between them."""
    options, rest = split_host_options(arguments)
    parser = argparse.ArgumentParser(
        prog="allstep doctor",
        description="Says what is wrong with this host, or with those of --hosts or a launcher.",
        allow_abbrev=False,
    )
    parser.add_argument("--hosts", metavar="A,B,...", help="hosts that ssh reaches")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the links between hosts")
    parser.add_argument("--port", type=int, help="of rank 0: whether it is free on the first host")
    parser.add_argument("--workers", type=int, default=16, help="in all, for the limits")
    parser.add_argument("--model-bytes", type=int, default=0, help="of parameters, for /dev/shm")
    known = parser.parse_args(rest)
    check_integer("workers", known.workers)
    check_integer("model_bytes", known.model_bytes, 0)
    if known.port is not None:
        check_port(known.port, 1)
    if known.plot is not None:
        if options is None and read_launch().size == 1:
            raise UsageError(
                "`plot` draws links between hosts, and there is one; name more with --hosts."
            )
        check_plot(known.plot)
    num_descriptors = descriptors_needed(known.workers)
    machine = {"num_descriptors": num_descriptors, "port": known.port, "folder": "."}
    if options is None and read_launch().size > 1:
        return run_here(partial(_look_together, known=known, machine=machine))
    if options is None:
        here = os.uname().nodename
        readings = {here: facts_of([], []) | probe_machine(**machine) | {"skew_s": 0.0}}
        links: dict[tuple[str, str], Mapping[str, Any]] = {}
    else:
        with open_links(options, queue.Queue()) as opened:
            readings = {link.name: _read_host(link, machine) for link in opened}
            links = _read_links(opened)
    return _judge(readings, links, known)


def _judge(
    readings: Mapping[str, Mapping[str, Any]],
    links: Mapping[tuple[str, str], Mapping[str, Any]],
    known: argparse.Namespace,
) -> int:
    """Prints the findings; returns the exit code."""
    found = find_faults(readings, links, known.workers, known.model_bytes)
    _show(found, readings, links, is_json=known.json)
    if known.plot is not None and links:
        with writing_errors(f"`plot` (={known.plot})"):
            draw_links(known.plot, links)
    return FOUND if any(finding.cure for finding in found) else 0


def _look_together(
    comm: Communicator, known: argparse.Namespace, machine: Mapping[str, Any]
) -> int:
    """Examines the nodes by a launcher's workers, one of each; the exit code is rank 0's."""
    interface = read_gloo_interface()
    address = next((own for name, own in own_addresses() if name == interface), "127.0.0.1")
    with ExitStack() as stack:

        def read() -> dict[str, Any]:
            server = EchoServer()
            stack.callback(server.close)
            echo = comm.rank, (address, *server.ports)
            return probe_machine(**machine) | {"echo": echo}

        readings = read_together(comm, read)
        echoes = {host: own.pop("echo") for host, own in readings.items()}
        links = {}
        for host, (rank, _) in echoes.items():
            for other, (_, ports) in echoes.items():
                if rank == comm.rank and other != host:
                    links[host, other] = probe(*ports)
            comm.barrier()
        seen = comm.all_gather_object([[*pair, found] for pair, found in links.items()])
    if comm.rank != 0:
        return 0
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
    """(host, other) -> the host's readings when it sends to the other, one pair at a time."""
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
        print_json(plain, indent=2)
        return
    for (one, other), link in links.items():
        if link["rate_bps"]:
            latency_us, rate = 1e6 * link["latency_s"], link["rate_bps"] / 1e6
            print(f"{one} to {other}: {latency_us:.0f} us there and back, {rate:.0f} Mbit/s")
    for finding in found:
        print(finding)
    if not any(finding.cure for finding in found):
        print("nothing wrong was found")
