"""Panel c: ways to exchange gradients on a slow wire, predicted and measured."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from allstep.cli.demo.panel import Bar, Chart, Panel
from allstep.cli.demo.processes import Processes
from allstep.cli.demo.slow_wire_runs import (
    BUCKET_BYTES,
    KINDS,
    WAYS,
    run_steps,
    run_steps_shaped,
)
from allstep.doctor import ShapedHosts, UnavailableError
from allstep.files import from_plain
from allstep.plan import DDP, Cluster, Link, MeasuredCollective, PolicySpec, Workload, simulate

_RATE_BPS = 200e6
_NAMESPACES = "Two network namespaces of this machine, each link shaped to 200 Mbit/s."

_FP16 = PolicySpec(
    name="fp16", compression="fp16", algorithm=dict(KINDS)["fp16"], bucket_bytes=BUCKET_BYTES
)
_POLICIES = {
    "plain": PolicySpec(name="plain", algorithm="native", bucket_bytes=None),
    "DDP": DDP,
    "fp16": _FP16,
    "fp16 + staleness 1": replace(_FP16, name="fp16 + staleness 1", staleness=1),
}


def measure(processes: Processes, folder: Path) -> Iterator[Panel]:
    """Runs all ways on two hosts, or behind a token bucket where there can be none."""
    try:
        with ShapedHosts(2, _RATE_BPS) as hosts:
            yield _panel(None, _NAMESPACES, "timing steps on two hosts")
            found = processes.run_on_hosts(hosts, run_steps)
            label = _NAMESPACES
    except UnavailableError as reason:
        label = (
            f"No two hosts here ({reason}): the wire is a token bucket of 200 Mbit/s under"
            " allstep's collectives, and DDP goes through it by allstep's hook."
        )
        yield _panel(None, label, "timing steps on two workers")
        found = processes.run(2, run_steps_shaped, rate_bps=_RATE_BPS)
    yield _panel(found, label, "")


def _predict(found: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step each way, from exchanges as timed and the step without any."""
    collectives = from_plain(tuple[MeasuredCollective, ...], found["collectives"])
    link = Link(bandwidth_bps=_RATE_BPS)
    cluster = Cluster(
        name="slow wire",
        num_nodes=2,
        workers_per_node=1,
        intra=link,
        inter=link,
        copy_bytes_per_s=1 / found["copy_s_per_byte"],
        bucketing_s_per_byte=found["copy_s_per_byte"],
        collectives=collectives,
    )
    workload = from_plain(Workload, found["workload"])
    return {way: simulate(workload, cluster, policy).step_s for way, policy in _POLICIES.items()}


def _panel(found: Mapping[str, Any] | None, label: str, status: str) -> Panel:
    measured = {} if found is None else found["step_s"]
    predicted = {} if found is None else _predict(found)
    return Panel(
        letter="c",
        title="Slow wire: a training step of 2 workers at 200 Mbit/s, 8 MiB of gradients",
        header=("", "predicted, ms", "measured, ms", "efficiency", "v. DDP"),
        rows=[_row(way, predicted, measured) for way in WAYS],
        chart=Chart(
            "milliseconds a step",
            [
                Bar(way, 1e3 * seconds[way], series)
                for way in _POLICIES
                for series, seconds in (("predicted", predicted), ("measured", measured))
                if seconds
            ],
        ),
        notes=(
            label,
            "Predicted from timed exchanges and from the step alone; nothing was fitted to the"
            " steps with an exchange. Efficiency is the time of the step alone over the step's.",
        ),
        status=status,
        conclusion=_conclude(predicted, measured) if found is not None else "",
        numbers={} if found is None else {**found, "predicted_s": predicted, "wire": label},
    )


def _row(way: str, predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    name = "no exchange" if way == "alone" else way
    if not measured:
        return [name, "", "", "", ""]
    seconds = measured[way]
    return [
        name,
        f"{1e3 * predicted[way]:.0f}" if way in predicted else "-",
        f"{1e3 * seconds:.0f}",
        f"{measured['alone'] / seconds:.0%}",
        f"{measured['DDP'] / seconds:.2f}x" if way != "alone" else "",
    ]


def _conclude(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    best = min(_POLICIES, key=lambda way: measured[way])
    errors = [abs(predicted[way] / measured[way] - 1) for way in _POLICIES]
    return (
        f"{best} is {measured['DDP'] / measured[best]:.1f}x as fast as DDP,"
        f" {measured['alone'] / measured[best]:.0%} of the speed without a wire."
        f" The predictions were off by at most {max(errors):.0%}."
    )
