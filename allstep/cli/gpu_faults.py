"""What readings of GPUs say is wrong."""

import statistics
from collections.abc import Mapping
from typing import Any

from allstep.cli.finding import Finding

_SLOW = 1.5  # times slower than idle ones of its kind is a fault
_REPAIR = "have it repaired or replaced; until then leave it out by CUDA_VISIBLE_DEVICES"
_NO_PEERS = (
    "NCCL_P2P_DISABLE=1 for all workers, whose gradients then go through the host's memory; or"
    " switch off the board's IOMMU and PCIe ACS"
)


def faults_of_gpus(readings: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """What is wrong, by host.

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
    """What it computes wrongly, and what it says of itself."""
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
    """From GPU to GPU; and what did not come to an end, or could not be looked at."""
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
    """Against the others of their kind, on all hosts."""
    times_s: dict[str, list[float]] = {}
    gpus = [(h, i, gpu) for h, own in readings.items() for i, gpu in enumerate(own.get("gpus", ()))]
    for _, _, gpu in gpus:
        times_s.setdefault(gpu["kind"], []).append(gpu["time_s"])
    found = []
    for host, index, gpu in gpus:
        slowness = gpu["time_s"] / statistics.median_low(times_s[gpu["kind"]])
        if slowness > _SLOW:
            what = f"GPU {index} takes {slowness:.1f} times as long as the others"
            cure = "look at its clocks, and for other programs on it: nvidia-smi"
            found.append(Finding("slow GPU", host, what, cure))
    return found
