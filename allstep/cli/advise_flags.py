"""The flags of `allstep advise`, and the machines that they describe."""

import argparse
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

from allstep.cli.quantities import parse_bandwidth, parse_count, parse_counts
from allstep.doctor import read_measurements
from allstep.errors import UsageError, check_integer, check_not_negative, check_positive
from allstep.plan import Cluster, Link, Price, preset_names, read_cluster

# What TCP leaves of a line with frames of 1,500 bytes.
_TCP_SHARE = 0.94
_USUAL_WORKERS = 32
_MOST_STRAGGLERS = 100  # per cent
_MOST_WORKERS = 1 << 20  # of which each phase of a ring is gone through
MACHINE_FLAGS = (
    "link",
    "cluster",
    "latency_us",
    "per_node",
    "node_link",
    "copy_gb_s",
    "contention",
)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}

_EXAMPLE = "example: allstep advise --params 25M --step-ms 110 --link 10gbit --workers 1,2,4,8,32"


def make_parser() -> argparse.ArgumentParser:
    """The parser of `allstep advise`'s flags; a recipe's own are added."""
    parser = argparse.ArgumentParser(
        prog="allstep advise",
        usage="allstep advise --params N --step-ms MS (--link RATE | --cluster NAME) [flags]\n"
        "       allstep advise RECIPE (--link RATE | --cluster NAME) [flags, also the recipe's]\n"
        "       allstep advise SCRIPT.py (--link RATE | --cluster NAME) [flags] [-- the script's]\n"
        "       allstep advise (RECIPE | ...) --measure [--workers N,N,...]",
        description="Predicts step time and efficiency of ways to exchange gradients, on any"
        " number of workers, and recommends one; or says that scaling doesn't pay.",
        epilog=_EXAMPLE,
        allow_abbrev=False,
    )
    job = parser.add_argument_group("the training")
    job.add_argument("--params", metavar="N", help="parameters, such as 25M")
    job.add_argument(
        "--step-ms", metavar="MS", type=float, help="milliseconds of a micro-batch on one worker"
    )
    job.add_argument(
        "--dtype", metavar="NAME", help=f"of the parameters: {', '.join(DTYPE_BYTES)} (float32)"
    )
    job.add_argument("--micro-batch", metavar="N", type=int, help="its samples (default: 32)")
    job.add_argument(
        "--global-batch",
        metavar="N",
        type=int,
        help="samples of a step whatever the workers (default: one micro-batch a worker)",
    )
    job.add_argument(
        "--total-samples",
        metavar="N",
        help="samples of the whole training, such as 115M (epochs times the training set; a recipe"
        " knows): says how long it takes, and whether that is worth starting several workers",
    )
    job.add_argument(
        "--timeout-s",
        metavar="S",
        type=float,
        default=300.0,
        help="of a script (its first steps are timed, eleven or more): longest time without a"
        " forward or a step (default: 300)",
    )
    job.add_argument(
        "--noise-scale",
        metavar="N",
        help="the gradient noise scale in samples, as a run reports it: counts what larger"
        " batches cost in samples",
    )
    job.add_argument(
        "--curve",
        metavar="FILE",
        type=Path,
        help="curve.json of `allstep curve`: says whether more data, a larger model or more workers"
        " would help",
    )
    job.add_argument(
        "--transformer",
        metavar="depth=N,...",
        help="with --mesh, without a recipe: the model's blocks,"
        " depth=24,width=1024,heads=16,sequence-length=512",
    )
    job.add_argument(
        "--states-per-param",
        metavar="X",
        type=float,
        help="with --mesh, without a recipe: numbers that the optimizer keeps of a parameter"
        " (default: 2, AdamW's; 1 is SGD's momentum)",
    )
    job.add_argument(
        "--max-points-lost",
        metavar="X",
        type=float,
        default=0.5,
        help="points of accuracy that a lossy policy may cost to be proposed (default: 0.5)",
    )
    cluster = parser.add_argument_group("the machines")
    cluster.add_argument(
        "--workers",
        metavar="N,N,...",
        help=f"default: 1, 2, 4, ... up to {_USUAL_WORKERS}, or those of the cluster",
    )
    cluster.add_argument("--link", metavar="RATE", help="between machines, such as 10gbit")
    cluster.add_argument(
        "--cluster", metavar="NAME|FILE", help=f"instead of --link: {', '.join(preset_names())}"
    )
    cluster.add_argument(
        "--latency-us",
        metavar="US",
        type=float,
        help="microseconds of a small message (default: 30)",
    )
    cluster.add_argument(
        "--per-node", metavar="N", type=int, help="workers of a machine (default: 1)"
    )
    cluster.add_argument(
        "--node-link", metavar="RATE", help="between workers of a machine (default: 80gbit)"
    )
    cluster.add_argument(
        "--copy-gb-s",
        metavar="X",
        type=float,
        help="gigabytes a worker's memory copies in a second (default: 10; a GPU's is 300 to 3000)",
    )
    cluster.add_argument(
        "--contention",
        metavar="PCT",
        type=float,
        help="by how many percent compute is slower beside communication (default: 10)",
    )
    cluster.add_argument(
        "--stragglers",
        metavar="PCT",
        type=float,
        help="by how many percent the compute of a step varies between workers (default: 0)",
    )
    cluster.add_argument(
        "--mesh",
        metavar="data=N,pipeline=N,tensor=N,shard=N|auto",
        help="copies of a transformer, workers that have some of its blocks each, and workers that"
        " share a block (tensor parallelism); those along data over which FSDP2 shards; auto ranks"
        " all meshes of --workers N, those with pipelines if there is a --global-batch",
    )
    cluster.add_argument(
        "--stages-per-worker",
        metavar="N",
        type=int,
        help="with --mesh: of a pipeline; above 1 with the interleaved schedule (default: 1, 1F1B)",
    )
    cluster.add_argument(
        "--memory-gib",
        metavar="X",
        type=float,
        help="with --mesh: of a worker; meshes that need more drop out",
    )
    cluster.add_argument(
        "--measure",
        action="store_true",
        help="the machines at hand: measure them, then run every policy on them, too",
    )
    price = parser.add_argument_group("the price")
    price.add_argument(
        "--price-per-hour",
        metavar="X",
        type=float,
        help="of a machine: says what the whole training costs",
    )
    price.add_argument(
        "--interruptions-per-day",
        metavar="X",
        type=float,
        help="of a machine, as a spot instance is taken away (default: 0)",
    )
    price.add_argument(
        "--restart-s",
        metavar="S",
        type=float,
        help="seconds from an interruption to the next step (default: 120)",
    )
    price.add_argument(
        "--checkpoint-every-s",
        metavar="S",
        type=float,
        help="seconds between checkpoints (default: 600)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--timeline", action="store_true", help="show the recommended step")
    output.add_argument("--json", metavar="FILE", type=Path, help="write all numbers")
    output.add_argument("--plot", metavar="FILE.png", type=Path, help="draw efficiency")
    return parser


def refuse_given(known: Namespace, names: Iterable[str], why: str) -> None:
    """Raises UsageError for flags that exclude each other.

    Args:
        known: the flags.
        names: of those that must not be given.
        why: and the cure; `{flag}` in it stands for the one that is.
    """
    for name in names:
        value = getattr(known, name)
        if value is not None and value is not False:
            flag = f"--{name.replace('_', '-')}"
            text = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"`{name}` (={text}) {why.replace('{flag}', flag)}")


def check_numbers(known: Namespace) -> None:
    """Raises UsageError for numbers out of range, and converts those with units."""
    for name in ("micro_batch", "per_node", "stages_per_worker"):
        value = getattr(known, name)
        if value is not None:
            check_integer(name, value)
    for name in ("noise_scale", "total_samples"):
        text = getattr(known, name)
        if text is not None:
            setattr(known, name, parse_count(name, text))
    for name, check, example in (
        ("copy_gb_s", check_positive, "10 is usual for a CPU"),
        ("memory_gib", check_positive, "32 is 32 GiB a worker"),
        ("states_per_param", check_not_negative, "2 is AdamW's"),
        ("latency_us", check_not_negative, "30 is usual for Ethernet"),
        ("contention", check_not_negative, "10 means 10 % slower"),
        ("stragglers", check_not_negative, "5 is about 5 %"),
        ("max_points_lost", check_not_negative, "0 takes what costs nothing"),
    ):
        value = getattr(known, name)
        if value is not None:
            check(name, value, example)
    known.stragglers = known.stragglers or None
    if known.stragglers is not None and known.stragglers > _MOST_STRAGGLERS:
        raise UsageError(
            f"`stragglers` (={known.stragglers:g}) must be at most {_MOST_STRAGGLERS}; 5 is about"
            " 5 %."
        )


def read_price(known: Namespace) -> Price | None:
    """The price of the machines; None if it was not given."""
    names = ("interruptions_per_day", "restart_s", "checkpoint_every_s")
    if known.price_per_hour is None:
        why = "counts in what the training costs; give `--price-per-hour`, too."
        refuse_given(known, names, why)
        return None
    given = {name: value for name in names if (value := getattr(known, name)) is not None}
    check_not_negative("price_per_hour", known.price_per_hour, "2.5 for a machine and an hour")
    return Price(per_hour=known.price_per_hour, **given)


def read_machines(
    known: Namespace, counts: Sequence[int] | None = None
) -> tuple[Cluster, list[int]]:
    """The cluster, and the numbers of workers to predict.

    Args:
        known: flags that `check_numbers` has let through.
        counts: the numbers of workers if no flag says them; None for the usual ones.
    """
    asked = counts if known.workers is None else parse_counts("workers", known.workers)
    if known.cluster is None:
        per_node = known.per_node or 1
        found = asked or _usual_counts(per_node, max(2, _USUAL_WORKERS // per_node))
        cluster = _bare_cluster(known, max(found))
    else:
        cluster = _named_cluster(known)
        found = asked or _usual_counts(cluster.workers_per_node, cluster.num_nodes)
    for count in found:
        if count > _MOST_WORKERS:
            raise UsageError(f"`workers` (={count:,}) must be at most {_MOST_WORKERS:,}.")
        cluster.of(count, argument="workers")
    return cluster, list(found)


def _usual_counts(per_node: int, num_nodes: int) -> list[int]:
    """Powers of two within a node, of whole nodes, and all workers.

    >>> _usual_counts(6, 5)
    [1, 2, 4, 6, 12, 24, 30]
    """
    inside = powers_of_two(per_node - 1)
    filling = (per_node * nodes for nodes in powers_of_two(num_nodes))
    return sorted({*inside, *filling, per_node * num_nodes})


def powers_of_two(most: int) -> list[int]:
    """The powers of two from 1 up to a number."""
    return [1 << exponent for exponent in range(most.bit_length())]


def _bare_cluster(known: Namespace, most: int) -> Cluster:
    if known.link is None:
        raise UsageError(
            "`link` is missing: what joins the machines, such as `--link 10gbit`;"
            " or name a `--cluster`."
        )
    per_node = known.per_node or 1
    latency_us = 30.0 if known.latency_us is None else known.latency_us
    node_link = "80gbit" if known.node_link is None else known.node_link
    contention = 10.0 if known.contention is None else known.contention
    copy_gb_s = 10.0 if known.copy_gb_s is None else known.copy_gb_s
    return Cluster(
        name=f"{known.link} between machines",
        num_nodes=-(-most // per_node),
        workers_per_node=per_node,
        intra=Link(bandwidth_bps=parse_bandwidth("node_link", node_link), latency_s=5e-6),
        inter=Link(
            bandwidth_bps=_TCP_SHARE * parse_bandwidth("link", known.link),
            latency_s=latency_us * 1e-6,
        ),
        copy_bytes_per_s=copy_gb_s * 1e9,
        compute_slowdown=contention / 100,
    )


def _named_cluster(known: Namespace) -> Cluster:
    refuse_given(
        known,
        (name for name in MACHINE_FLAGS if name != "cluster"),
        f"and `cluster` (={known.cluster}) both say what the machines are: leave `{{flag}}` out, or"
        " copy the cluster's file and change it there.",
    )
    if known.cluster.endswith(".json"):
        return read_measurements(Path(known.cluster), argument="cluster").cluster
    return read_cluster(known.cluster)
