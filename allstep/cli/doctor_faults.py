"""Faults in the readings of hosts and their network; nothing is measured here."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.cli.ring_order import best_ring, slowest_bps
from allstep.env import is_loopback

_SLOW = 3.0  # times slower than the usual is a fault
_CLOCK_S = 2.0
_LOSS = 0.01
_SHARED_BYTES = 128 << 20
_STACK_BYTES = 1 << 20
_DISK_BYTES_PER_S = 5e6
_LOCKED_BYTES = 1 << 30
_SAME = {
    "python": "Python",
    "torch": "torch",
    "allstep": "allstep",
    "code": "the code of allstep",
    "driver": "the GPUs' driver",
    "nccl": "NCCL",
}

_SLOW_GPU = 1.5  # times slower than idle ones of its kind is a fault
_REPAIR = "have it repaired or replaced; until then leave it out by CUDA_VISIBLE_DEVICES"
_NO_PEERS = (
    "NCCL_P2P_DISABLE=1 for all workers, whose gradients then go through the host's memory; or"
    " switch off the board's IOMMU and PCIe ACS"
)


@dataclass(frozen=True)
class Finding:
    """A fault, its place and its cure.

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

    def __str__(self) -> str:
        """A line with the fault, and one with the cure if there is one."""
        cure = f"\n    cure: {self.cure}" if self.cure else ""
        return f"{self.where}: {self.fault}: {self.what}{cure}"


def descriptors_needed(num_workers: int) -> int:
    """The number of open files and connections of a worker among a number of workers."""
    return 4 * num_workers + 96


def find_faults(
    readings: Mapping[str, Mapping[str, Any]],
    links: Mapping[tuple[str, str], Mapping[str, Any]],
    num_workers: int,
    model_bytes: int = 0,
) -> list[Finding]:
    """The faults of hosts and links.

    Args:
        readings: host -> `facts_of` and `probe_machine`, and `skew_s`, its clock's difference;
            cores and GPUs may be missing.
        links: (host, other) -> `probe`.
        num_workers: in all.
        model_bytes: of the parameters.
    """
    found: list[Finding] = []
    for number, (host, own) in enumerate(readings.items()):
        found += _faults_of_host(host, own, num_workers, model_bytes, is_first=number == 0)
    found += _different_versions(readings)
    found += _slow_cores(readings)
    found += _faults_of_gpus(readings)
    for (one, other), link in links.items():
        found += _faults_of_link(f"{one} to {other}", other, link)
    return found + _slow_links(links) + _slow_ring(list(readings), links)


def _faults_of_host(
    host: str, own: Mapping[str, Any], num_workers: int, model_bytes: int, *, is_first: bool
) -> list[Finding]:
    needed = descriptors_needed(num_workers)
    shared = _SHARED_BYTES + 4 * model_bytes
    rate, address = own["disk_bytes_per_s"], own["name_address"]
    table = [
        (
            "name is loopback",
            address and is_loopback(address),
            f"its own name is {address}; allstep finds another address by itself",
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
            "limit of locked memory",
            own["locked_bytes"] is not None and own["locked_bytes"] < _LOCKED_BYTES,
            f"{own['locked_bytes']} bytes may be locked; NCCL locks more for InfiniBand",
            "ulimit -l unlimited; LimitMEMLOCK= of a unit; --ulimit memlock=-1 of docker run",
        ),
        (
            "shared memory",
            own["shared_bytes"] is not None and own["shared_bytes"] < shared,
            f"/dev/shm has {own['shared_bytes']} bytes left of the {shared} needed",
            "docker run --shm-size 8g, or mount -o remount,size=8g /dev/shm",
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
    found = [Finding(fault, host, what, cure) for fault, is_there, what, cure in table if is_there]
    return [*found, port_taken(host)] if is_first and own["is_port_taken"] else found


def port_taken(host: str) -> Finding:
    """The finding that the first host has no port for rank 0."""
    what = "another program listens on the port of rank 0"
    return Finding("port taken", host, what, "another --master-port")


def _different_versions(readings: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    first, *_ = readings
    return [
        Finding(
            "versions",
            host,
            f"{what} {own.get(key)}, on {first} {readings[first].get(key)}",
            "install the same on all hosts",
        )
        for host, own in readings.items()
        for key, what in _SAME.items()
        if own.get(key) != readings[first].get(key)
    ]


def _slow_cores(readings: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Cores that are slower than others of their host; those of another processor type may be."""
    found = []
    for host, own in readings.items():
        cores = own.get("cores")
        if not cores:
            continue
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
    if link["own"] != link["seen"]:
        what = f"{other} gets what comes from {link['own']} as if from {link['seen']}"
        cure = (
            "no translation of addresses (NAT) between the hosts, as workers connect both ways: one"
            " network, a VPN, or --network=host of docker run"
        )
        return [Finding("NAT", where, what, cure)]
    if link["loss"] > _LOSS:
        what = f"{100 * link['loss']:.1f} % of the packets are lost"
        return [Finding("packet loss", where, what, "look at cable, port and duplex of both hosts")]
    return []


def _slow_links(links: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[Finding]:
    """Links that are slower than the fastest; a host's port, if all its links are."""
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


def _slow_ring(
    hosts: Sequence[str], links: Mapping[tuple[str, str], Mapping[str, Any]]
) -> list[Finding]:
    """The order of the hosts, if another order makes the workers' ring faster."""
    rates = {pair: link["rate_bps"] for pair, link in links.items()}
    if not all(rates.get((one, other)) for one in hosts for other in hosts if one != other):
        return []
    order = best_ring(hosts, rates)
    if order == list(hosts):
        return []
    given, best = (slowest_bps(names, rates) / 1e6 for names in (hosts, order))
    what = f"a ring in this order sends {given:.0f} Mbit/s at its slowest link, another {best:.0f}"
    cure = f"give the hosts in the order {','.join(order)}; workers are numbered by it"
    return [Finding("order of the hosts", ", ".join(hosts), what, cure)]


def _faults_of_gpus(readings: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """The faults of the hosts' GPUs.

    Args:
        readings: host -> `probe_gpus`; may be missing.
    """
    found: list[Finding] = []
    for host, own in readings.items():
        for index, gpu in enumerate(own.get("gpus", ())):
            found += _faults_of_gpu(host, index, gpu)
        found += _faults_of_copies(host, own)
    return found + _slow_gpus(readings)


def _faults_of_gpu(host: str, index: int, gpu: Mapping[str, Any]) -> list[Finding]:
    """The faults of a GPU: wrong results, and errors that it reports."""
    rows = ", and rows to be replaced" if gpu["has_bad_rows"] else ""
    table = [
        (
            "lying GPU",
            gpu["num_wrong"],
            f"GPU {index} computes {gpu['num_wrong']} elements of a matrix product wrongly",
            _REPAIR,
        ),
        (
            "memory errors",
            gpu["num_memory_errors"] or gpu["has_bad_rows"],
            f"GPU {index} has {gpu['num_memory_errors']} uncorrected memory errors{rows}",
            f"nvidia-smi -r -i {index}, while nothing runs there; replace it if they come again",
        ),
        (
            "slowed GPU",
            gpu["slowed_by"],
            f"GPU {index}'s clocks are kept low by {', '.join(gpu['slowed_by'])}",
            "look at its cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        ),
    ]
    return [Finding(fault, host, what, cure) for fault, is_there, what, cure in table if is_there]


def _faults_of_copies(host: str, own: Mapping[str, Any]) -> list[Finding]:
    """Faults of copies between GPUs, and readings that failed or did not end."""
    found = []
    for one, other, arrived in own.get("wrong_copies", ()):
        what = f"of a copy from GPU {one} to GPU {other} {arrived} arrive"
        found.append(Finding("copies between GPUs", host, what, _NO_PEERS))
    if own.get("stuck"):
        is_copy = own["stuck"].startswith("a copy")
        fault, cure = ("copies between GPUs", _NO_PEERS) if is_copy else ("stuck GPU", _REPAIR)
        found.append(Finding(fault, host, f"{own['stuck']} does not end", cure))
    if own.get("error"):
        cure = "see what the driver says: nvidia-smi, dmesg"
        found.append(Finding("failed GPU", host, f"it failed at {own['error']}", cure))
    if own.get("missing"):
        found.append(Finding("not looked at", host, own["missing"], ""))
    return found


def _slow_gpus(readings: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """GPUs that are slower than others of their type, on all hosts."""
    times_s: dict[str, list[float]] = {}
    gpus = [(h, i, gpu) for h, own in readings.items() for i, gpu in enumerate(own.get("gpus", ()))]
    for _, _, gpu in gpus:
        times_s.setdefault(gpu["kind"], []).append(gpu["time_s"])
    found = []
    for host, index, gpu in gpus:
        slowness = gpu["time_s"] / statistics.median_low(times_s[gpu["kind"]])
        if slowness > _SLOW_GPU:
            what = f"GPU {index} takes {slowness:.1f} times as long as the others"
            cure = "look at its clocks, and for other programs on it: nvidia-smi"
            found.append(Finding("slow GPU", host, what, cure))
    return found
