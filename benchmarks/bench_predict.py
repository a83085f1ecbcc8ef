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
`--report` writes the table and the scatter plot of the docs.
"""

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, circumstances, print_headline
from network import ShapedHosts, UnavailableError, run_on_one_host
from rich.console import Console
from rich.table import Table
from torch import nn

import allstep
from allstep.comm import Communicator
from allstep.doctor.measure import measure
from allstep.doctor.measurements import Measurements, read_measurements
from allstep.doctor.trial import Training, measure_policy, measure_workload, sleeping_training
from allstep.plan.job import Job
from allstep.plan.policy import MIB, POLICIES, Policy
from allstep.plan.recommend import simplest_fast
from allstep.plan.scaling import Prediction, predict
from allstep.plan.workload import Workload, read_workload

LINKS = {"100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9, "one_host": None}
HOSTS = (2, 4, 8)
MODELS_MB = (2, 8, 25, 100)
NUM_LAYERS = 8
TARGETS = {"median_error_pct": 5.0, "worst_error_pct": 15.0, "advise_regret_pct": 5.0}
POLICY_SECONDS = 4.0  # of the timed steps of a policy, if a step is that short
DOCS = Path(__file__).parent.parent / "docs"
TABLE, PLOT = DOCS / "tables" / "predictions.md", DOCS / "guides" / "predictions.png"


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts on links, or ranks of one host.

    Attributes:
        link: a key of `LINKS`.
        num_hosts: or ranks.
        models_mb: megabytes of float32 gradients of each model.
        seconds: of the timed steps of a policy.
    """

    link: str
    num_hosts: int
    models_mb: Sequence[int]
    seconds: float = POLICY_SECONDS

    @property
    def name(self) -> str:
        return f"{self.link} {self.num_hosts}"

    def wire_s(self, model_mb: int) -> float:
        """Seconds of float32 on the wire."""
        rate_bps = LINKS[self.link] or 20e9
        return 2 * (self.num_hosts - 1) / self.num_hosts * 8e6 * model_mb / rate_bps

    def compute_s(self, model_mb: int) -> float:
        """About what float32 takes on the wire, so that neither is all of a step."""
        return min(0.6, max(0.03, self.wire_s(model_mb)))


def policies(algorithm: str) -> tuple[Policy, ...]:
    """What is compared; `algorithm` is what allstep takes on such hosts by itself."""
    own = Policy(name="fp32", algorithm=algorithm, bucket_bytes=8 * MIB, first_bucket_bytes=MIB)
    return (
        POLICIES[0],  # DDP
        own,
        replace(own, name="fp16", wire="fp16"),
        replace(own, name="int8", wire="int8"),
        replace(own, name="fp16 + staleness 1", wire="fp16", staleness=1),
        Policy(name="local SGD, H = 4", algorithm=algorithm, bucket_bytes=None, every=4),
    )


# -- as a rank -----------------------------------------------------------------------------------


def run_rank(file: Path) -> None:
    """Measures a network's constants, then its models' steps; rank 0 writes both."""
    torch.set_num_threads(1)
    network = Network(**json.loads(file.read_text()))
    with allstep.init(device="cpu") as comm:
        measurements = measure(comm)
        models = {str(mb): measure_model(comm, network, mb) for mb in network.models_mb}
        if comm.rank == 0:
            measurements.write(file.with_suffix(".measurements"))
            file.with_suffix(".models").write_text(json.dumps(models))
        comm.barrier()


def measure_model(comm: Communicator, network: Network, model_mb: int) -> dict[str, Any]:
    """The model's compute, and seconds of its steps under each policy."""
    num_elements, compute_s = model_mb * 250_000, network.compute_s(model_mb)
    if network.num_hosts == 2:
        make_training = real_training(comm, num_elements, compute_s)
    else:
        asleep = Workload.from_step(num_params=num_elements, step_s=compute_s)
        make_training = partial(sleeping_training, asleep)
    workload = measure_workload(comm, make_training(), num_samples=1)
    algorithm = "shared_memory" if LINKS[network.link] is None else "native"
    num_repeats = 3 if network.wire_s(model_mb) > 2 else 5
    seconds = {
        policy.name: measure_policy(
            comm, make_training, policy, num_repeats=num_repeats, seconds=network.seconds / 5
        )
        for policy in policies(algorithm)
    }
    return {"workload": asdict(workload), "seconds": seconds}


def real_training(
    comm: Communicator, num_elements: int, compute_s: float
) -> Callable[[], Training]:
    """Square layers, and a batch as large as it takes for `compute_s`, the same on all workers."""
    width = round((num_elements / NUM_LAYERS) ** 0.5)

    def make(x: torch.Tensor) -> Training:
        layers: list[nn.Module] = []
        for _ in range(NUM_LAYERS):
            layers += [nn.Linear(width, width, bias=False), nn.ReLU()]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        return Training(model, lambda net: net(x).mean(), optimizer)

    batch = 64
    for _ in range(3):
        trial = measure_workload(comm, make(torch.randn(batch, width)), num_samples=1, num_steps=5)
        step_s = comm.broadcast_object(trial.compute_s)
        batch = max(1, round(batch * compute_s / step_s))
    return partial(make, torch.randn(batch, width))


# -- the grid ------------------------------------------------------------------------------------


def measure_network(network: Network) -> list[dict[str, Any]]:
    """Runs a network's ranks; one row for each model and policy."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.json"
        file.write_text(json.dumps(asdict(network)))
        command = [sys.executable, __file__, "--rank", file]
        rate_bps = LINKS[network.link]
        if rate_bps is None:
            run: Callable[..., None] = partial(run_on_one_host, network.num_hosts)
            run(command, timeout_s=7200)
        else:
            with ShapedHosts(network.num_hosts, rate_bps) as hosts:
                hosts.run(command, timeout_s=7200)
        measurements = read_measurements(file.with_suffix(".measurements"))
        models = json.loads(file.with_suffix(".models").read_text())
    return [
        row
        for model_mb, model in models.items()
        for row in compare(network, int(model_mb), measurements, model)
    ]


def compare(
    network: Network, model_mb: int, measurements: Measurements, model: dict[str, Any]
) -> list[dict[str, Any]]:
    """Predicts a model's steps from the constants; beside what they were measured to take."""
    predictions = predict_steps(network, measurements, model["workload"])
    choice = simplest_fast([p for p in predictions if p.policy.every == 1]).policy.name
    return [
        {
            "link": network.link,
            "hosts": network.num_hosts,
            "model_mb": model_mb,
            "policy": p.policy.name,
            "compute_s": p.report.compute_s,
            "predicted_s": p.report.step_s,
            "measured_s": statistics.median(model["seconds"][p.policy.name]),
            "repeats_s": model["seconds"][p.policy.name],
            "is_advised": p.policy.name == choice,
        }
        for p in predictions
    ]


def predict_steps(
    network: Network, measurements: Measurements, workload: dict[str, Any]
) -> list[Prediction]:
    micro = read_workload(workload)
    algorithm = "shared_memory" if LINKS[network.link] is None else "native"
    cluster = measurements.cluster(network.name)
    return predict(Job(micro=micro), cluster, policies(algorithm), [network.num_hosts])


def error(row: dict[str, Any]) -> float:
    return row["predicted_s"] / row["measured_s"] - 1


def cells(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by network and model, those that exchange at every step."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if not row["policy"].startswith("local"):
            found.setdefault((row["link"], row["hosts"], row["model_mb"]), []).append(row)
    return found


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The numbers that the benchmark is about."""
    errors = [100 * abs(error(row)) for row in rows]
    regrets = []
    for cell in cells(rows).values():
        best_s = min(row["measured_s"] for row in cell)
        advised_s = next(row["measured_s"] for row in cell if row["is_advised"])
        regrets.append(100 * (advised_s / best_s - 1))
    return {
        "median_error_pct": statistics.median(errors),
        "worst_error_pct": max(errors),
        "advise_regret_pct": max(regrets),
        "advised_within_5_pct": sum(regret <= 5 for regret in regrets) / len(regrets),
        "num_steps_predicted": len(rows),
    }


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    table = Table("MB", "policy", "compute, ms", "predicted", "measured", "error", title=title)
    for row in rows:
        times = [f"{1e3 * row[k]:.1f}" for k in ("compute_s", "predicted_s", "measured_s")]
        star = " *" if row["is_advised"] else ""
        table.add_row(str(row["model_mb"]), row["policy"] + star, *times, f"{error(row):+.1%}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)


# -- the report ----------------------------------------------------------------------------------


def write_report(rows: Sequence[dict[str, Any]]) -> None:
    """The table and the picture of docs/guides/should_i_scale.md."""
    found = headline(rows)
    lines = [f"![Predicted and measured seconds of a step]({PLOT.name})\n"] if plot(rows) else []
    lines += [
        f"{len(rows)} steps: median error {found['median_error_pct']:.1f} %, worst"
        f" {found['worst_error_pct']:.1f} %. The advised policy is within 5 % of the measured best"
        f" in {found['advised_within_5_pct']:.0%} of the cells.\n",
        "| link | hosts | median error | worst error |",
        "|---|---|---|---|",
    ]
    for link, num_hosts in dict.fromkeys((row["link"], row["hosts"]) for row in rows):
        own = [abs(error(r)) for r in rows if (r["link"], r["hosts"]) == (link, num_hosts)]
        median = statistics.median(own)
        lines.append(f"| {link} | {num_hosts} | {median:.1%} | {max(own):.1%} |")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")


def plot(rows: Sequence[dict[str, Any]]) -> bool:
    """Predicted over measured; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install allstep[plot]")
        return False
    figure = Figure(figsize=(6, 5.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        measured = [1e3 * row["measured_s"] for row in own]
        axes.plot(measured, [1e3 * r["predicted_s"] for r in own], "o", alpha=0.7, label=name)
    ends = [1e3 * f(row["measured_s"] for row in rows) for f in (min, max)]
    axes.plot(ends, ends, "k-", linewidth=1)
    for factor in (0.85, 1.15):
        axes.plot(ends, [factor * end for end in ends], "k:", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_title("A training step (dotted: 15 % off)")
    axes.legend(fontsize="small")
    figure.savefig(PLOT, dpi=120)
    return True


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        sys.exit(f"nothing was measured: there is no {path}")
    parts = json.loads(path.read_text())["networks"]
    return [row for part in parts.values() for row in part["rows"]]


def add_network(network: Network, path: Path) -> None:
    """Measures a network and adds it to the results."""
    rows = measure_network(network)
    show(rows, network.name)
    parts = json.loads(path.read_text())["networks"] if path.exists() else {}
    parts[network.name] = {**circumstances(), "rows": rows}
    every_row = [row for part in parts.values() for row in part["rows"]]
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"targets": TARGETS, **headline(every_row), "networks": parts}, indent=2)
    path.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", choices=LINKS)
    parser.add_argument("--hosts", nargs="+", type=int)
    parser.add_argument("--models", nargs="+", type=int, metavar="MB")
    parser.add_argument("--quick", action="store_true", help="two networks, small models")
    parser.add_argument("--report", action="store_true", help="only write the docs' table and plot")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank)
        return
    quick = arguments.quick
    path = RESULTS / f"bench_predict{'_quick' if quick else ''}.json"
    if arguments.report:
        write_report(read_rows(path))
        return
    links = arguments.links or (("1gbit", "one_host") if quick else tuple(LINKS))
    hosts = arguments.hosts or ((2,) if quick else HOSTS)
    models_mb = arguments.models or ((2, 8) if quick else MODELS_MB)
    seconds = 1.0 if quick else POLICY_SECONDS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    for link, num_hosts in itertools.product(links, hosts):
        network = Network(link=link, num_hosts=num_hosts, models_mb=models_mb, seconds=seconds)
        try:
            add_network(network, path)
        except UnavailableError as reason:
            print(f"skipped {network.name}: {reason}")
    print_headline(**headline(read_rows(path)))


if __name__ == "__main__":
    main()
