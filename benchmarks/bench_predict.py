"""Predicted step times against measured ones, over models, links, policies and hosts.

    python benchmarks/bench_predict.py [--quick] [--links 1gbit one_host] [--hosts 2] [--models 2 8]
    python benchmarks/bench_predict.py --report

What a link, a host and a wire format cost is measured once for each network, by
`allstep.doctor.measure`; what a model computes by its steps without any exchange. From these
alone `allstep.plan` predicts every step; nothing is fitted to the steps that it predicts. Then the
steps are run: forward, backward, exchange, update.

    models   2 to 100 MB of gradients; compute is real on two hosts, and sleep on more, which
             would share two cores
    links    100 Mbit/s, 1 and 10 Gbit/s between hosts (network namespaces of this machine with
             shaped links, see network.py: needs root), and ranks of one host
    policies torch's DistributedDataParallel, fp32, fp16, int8, fp16 one step late, local SGD

`advise_regret_pct` is how much slower than the measured best the policy is that `allstep advise`
would take by its prediction (those that exchange at every step), in the worst cell. Networks are
added to benchmarks/results/bench_predict.json as they end (with `--quick`: ..._quick.json).
`--report` predicts what was measured once more, and writes the docs' table and scatter plot.
"""

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import predict_worker
from common import RESULTS, circumstances, print_headline
from network import KEPT_MEMORY, ShapedHosts, UnavailableError, run_on_one_host
from predict_report import error, headline, write_report
from predict_worker import LINKS, Network
from rich.console import Console
from rich.table import Table

from allstep.doctor import measurements_of
from allstep.files import from_plain
from allstep.plan import PolicySpec, TrainingSpec, Workload, predict
from allstep.plan.recommend import simplest_fast

HOSTS = (2, 4, 8)
MODELS_MB = (2, 8, 25, 100)
TARGETS = {"median_error_pct": 5.0, "worst_error_pct": 15.0, "advise_regret_pct": 5.0}
POLICY_SECONDS = 4.0  # of the timed steps of a policy, if a step is that short


def measure_network(network: Network) -> dict[str, Any]:
    """Runs a network's ranks; its constants, the policies, each model's compute and steps."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.json"
        file.write_text(json.dumps(asdict(network)))
        command = [sys.executable, predict_worker.__file__, file]
        if network.rate_bps is None:
            run: Callable[..., None] = partial(run_on_one_host, network.num_hosts)
            run(command, timeout_s=7200, variables=KEPT_MEMORY)
        else:
            with ShapedHosts(network.num_hosts, network.rate_bps) as hosts:
                hosts.run(command, timeout_s=7200, variables=KEPT_MEMORY)
        names = ("measurements", "policies", "models")
        found = {name: json.loads(file.with_suffix(f".{name}").read_text()) for name in names}
    return {**circumstances(), "network": asdict(network), **found}


def compare(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """A network's steps as predicted from its constants, beside what they were measured to take."""
    network = Network(**measured["network"])
    cluster = replace(measurements_of(measured["measurements"]).cluster, name=network.name)
    policies = [PolicySpec(**fields) for fields in measured["policies"]]
    rows = []
    for model_mb, model in measured["models"].items():
        job = TrainingSpec(micro=from_plain(Workload, model["workload"]))
        predictions = predict(job, cluster, policies, [network.num_hosts])
        choice = simplest_fast([p for p in predictions if p.policy.sync_every == 1]).policy.name
        rows += [
            {
                "link": network.link,
                "hosts": network.num_hosts,
                "model_mb": int(model_mb),
                "policy": p.policy.name,
                "compute_s": p.report.compute_s,
                "predicted_s": p.report.step_s,
                "measured_s": statistics.median(model["seconds"][p.policy.name]),
                "is_advised": p.policy.name == choice,
            }
            for p in predictions
        ]
    return rows


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    table = Table("MB", "policy", "compute, ms", "predicted", "measured", "error", title=title)
    for row in rows:
        times = [f"{1e3 * row[k]:.1f}" for k in ("compute_s", "predicted_s", "measured_s")]
        star = " *" if row["is_advised"] else ""
        table.add_row(str(row["model_mb"]), row["policy"] + star, *times, f"{error(row):+.1%}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def read_networks(path: Path) -> dict[str, dict[str, Any]]:
    """What was measured, by network."""
    return json.loads(path.read_text())["networks"] if path.exists() else {}


def add_network(network: Network, path: Path) -> None:
    """Measures a network and adds it to the results."""
    networks = read_networks(path) | {network.name: measure_network(network)}
    show(compare(networks[network.name]), network.name)
    write(networks, path)


def write(networks: dict[str, dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Writes what was measured, and today's predictions of it, which are returned."""
    if not networks:
        sys.exit(f"nothing was measured: there is no {path}")
    rows = [row for measured in networks.values() for row in compare(measured)]
    RESULTS.mkdir(exist_ok=True)
    results = {"targets": TARGETS, **headline(rows), "rows": rows, "networks": networks}
    path.write_text(json.dumps(results, indent=1) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", choices=LINKS)
    parser.add_argument("--hosts", nargs="+", type=int)
    parser.add_argument("--models", nargs="+", type=int, metavar="MB")
    parser.add_argument("--seconds", type=float, default=POLICY_SECONDS, help="of a policy")
    parser.add_argument("--quick", action="store_true", help="two networks, small models")
    parser.add_argument("--report", action="store_true", help="only write the docs' table and plot")
    arguments = parser.parse_args()
    quick = arguments.quick
    path = RESULTS / f"bench_predict{'_quick' if quick else ''}.json"
    if arguments.report:
        write_report(write(read_networks(path), path))
        return
    links = arguments.links or (("1gbit", "one_host") if quick else tuple(LINKS))
    hosts = arguments.hosts or ((2,) if quick else HOSTS)
    models_mb = arguments.models or ((2, 8) if quick else MODELS_MB)
    seconds = 1.0 if quick else arguments.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    for link, num_hosts in itertools.product(links, hosts):
        network = Network(link=link, num_hosts=num_hosts, models_mb=models_mb, seconds=seconds)
        try:
            add_network(network, path)
        except UnavailableError as reason:
            print(f"skipped {network.name}: {reason}")
    print_headline(**headline(write(read_networks(path), path)))


if __name__ == "__main__":
    main()
