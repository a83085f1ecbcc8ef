"""All-reduce of CPU ranks on one host: shared memory against Gloo and Open MPI.

    python benchmarks/bench_allreduce.py [--quick] [--ranks 2 4]
    torchrun --nproc-per-node 8 ... benchmarks/bench_allreduce.py --device cuda   # your cluster

Needs Open MPI's `mpirun` and `pip install allstep[bench]`. The same processes take turns with
all of them, in place, on float32. A time is that of the slowest rank, from a barrier on. "Share"
is the time that all ranks take to copy as many bytes, at once, over the all-reduce's. Under a
launcher it compares all of allstep's algorithms with the backend's on that launcher's ranks.

`shared_memory` sums any tensor; `in_block` is the same algorithm on a tensor that lies in memory
which the ranks share, as the gradients of an attached model do.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import estimate, print_headline, ratio, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor

import allstep
from allstep.comm.algorithms import ALGORITHMS, make_algorithm
from allstep.comm.algorithms.shared import SharedMemory
from allstep.comm.shared_memory import Block
from allstep.env import read_launch
from allstep.errors import UsageError

SIZES_BYTES = [1 << power for power in range(12, 29)]  # 4 KiB to 256 MiB
QUICK_SIZES_BYTES = [1 << power for power in (12, 14, 16, 18, 20, 22, 24, 26)]
CLAIMED_BYTES = (1 << 20, 1 << 26)  # where the speedups are claimed
REPEAT_S = 0.03  # at least so long is a repeat, of as many calls as it takes
TARGETS = {"speedup_vs_gloo_min": 3.0, "speedup_vs_mpi_min": 1.5, "slowest_vs_best_peer": 1.0}

Call = Callable[[Tensor], object]


def peers_on_host(comm: allstep.Communicator) -> dict[str, Call]:
    """Ours, Gloo's, Open MPI's, and a copy of the same size."""
    ours = SharedMemory(comm)
    calls: dict[str, Call] = {
        "copy": copy_call(),
        "shared_memory": ours.reduce_,
        "in_block": in_block_call(ours),
        "gloo": dist.all_reduce,
    }
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        from mpi4py import MPI

        calls["mpi"] = lambda x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())
    return calls


def all_algorithms(comm: allstep.Communicator) -> dict[str, Call]:
    """All that these ranks and nodes allow."""
    calls: dict[str, Call] = {"copy": copy_call()}
    for name in ALGORITHMS:
        try:
            calls[name] = make_algorithm(name, comm).reduce_
        except UsageError:
            continue
    return calls


def in_block_call(algorithm: SharedMemory) -> Call:
    """Sums a tensor of the same size in memory that the ranks share, allocated once a size."""
    targets: dict[int, tuple[Block, Tensor]] = {}  # a block sums only as long as it is kept

    def reduce_(x: Tensor) -> None:
        if x.nbytes not in targets:
            targets.clear()
            block = algorithm.new_block(x.nbytes)
            targets[x.nbytes] = block, block.own.view(x.dtype)
        algorithm.reduce_(targets[x.nbytes][1])

    return reduce_


def copy_call() -> Call:
    """Copies a tensor to another, allocated once a size."""
    targets: dict[int, Tensor] = {}

    def copy(x: Tensor) -> None:
        if x.nbytes not in targets:
            targets.clear()
            targets[x.nbytes] = torch.empty_like(x)
        targets[x.nbytes].copy_(x)

    return copy


def measure(
    comm: allstep.Communicator, calls: dict[str, Call], size_bytes: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each call in each repeat, of the slowest rank; calls take turns."""
    x = torch.zeros(size_bytes // 4, device=comm.device)
    counts = {name: calls_a_repeat(comm, call, x) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        names = list(calls) if repeat % 2 else list(reversed(calls))
        for name in names:
            own_s = timed(comm, calls[name], x, counts[name])
            seconds[name].append(slowest(comm, own_s) / counts[name])
    return seconds


def calls_a_repeat(comm: allstep.Communicator, call: Call, x: Tensor) -> int:
    """How many calls make a repeat, the same on every rank."""
    timed(comm, call, x, 2)
    once_s = slowest(comm, timed(comm, call, x, 3)) / 3
    return max(1, min(2000, round(REPEAT_S / once_s)))


def timed(comm: allstep.Communicator, call: Call, x: Tensor, count: int) -> float:
    comm.barrier()
    start_s = time.perf_counter()
    for _ in range(count):
        call(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def slowest(comm: allstep.Communicator, own_s: float) -> float:
    return comm.all_reduce(torch.tensor(own_s, dtype=torch.float64), "max").item()


def work(arguments: argparse.Namespace) -> None:
    """One rank's life: measures, and on rank 0 writes or shows what came out."""
    on_host = arguments.device == "cpu" and arguments.output is not None
    with allstep.init(device=arguments.device) as comm:
        calls = peers_on_host(comm) if on_host else all_algorithms(comm)
        rows = {
            size_bytes: measure(comm, calls, size_bytes, arguments.repeats)
            for size_bytes in arguments.sizes
        }
        if comm.rank:
            return
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(rows))
            return
        show(comm.size, rows, "native")
        seconds = {
            size: {name: estimate(s).median for name, s in row.items()}
            for size, row in rows.items()
        }
        write_results("bench_allreduce_cluster", {"num_ranks": comm.size, "seconds": seconds})


def launch(num_ranks: int, arguments: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    """Starts the ranks under mpirun and returns size -> name -> seconds."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        script = [
            sys.executable, __file__, "--device", "cpu", "--output", str(output),
            "--repeats", str(arguments.repeats), "--sizes", *map(str, arguments.sizes),
        ]  # fmt: skip
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as torchrun does
        subprocess.run(
            [*mpirun, "-n", str(num_ranks), *script], check=True, env=environment, timeout=3600
        )
        return {int(size): row for size, row in json.loads(output.read_text()).items()}


def show(num_ranks: int, rows: dict[int, dict[str, list[float]]], base: str) -> None:
    """A table of medians with intervals, and how much faster `base` is than the others."""
    names = [name for name in next(iter(rows.values())) if name != "copy"]
    others = [name for name in names if name not in (base, "in_block")]
    title = f"{num_ranks} ranks: milliseconds (interval), share of a copy's speed"
    table = Table("size", *names, *(f"{base} v. {name}" for name in others), title=title)
    for size_bytes, row in rows.items():
        cells = []
        for name in names:
            ms = estimate([1e3 * s for s in row[name]])
            cells.append(f"{ms}, {ratio(row['copy'], row[name]).median:.0%}")
        faster = [f"{ratio(row[name], row[base])}x" for name in others]
        label = f"{size_bytes >> 20} MiB" if size_bytes >> 20 else f"{size_bytes >> 10} KiB"
        table.add_row(label, *cells, *faster)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def headline(results: dict[int, dict[int, dict[str, list[float]]]]) -> dict[str, float]:
    """The numbers that the benchmark is about, worst over ranks and sizes."""
    rows = [(size, row) for of_ranks in results.values() for size, row in of_ranks.items()]
    low, high = CLAIMED_BYTES
    claimed = [row for size, row in rows if low <= size <= high]
    keys = {}
    for peer in ("gloo", "mpi"):
        for name, prefix in {"shared_memory": "", "in_block": "in_block_"}.items():
            speedups = [ratio(row[peer], row[name]).median for row in claimed]
            keys[f"{prefix}speedup_vs_{peer}_min"] = min(speedups)
    keys["slowest_vs_best_peer"] = max(
        max(ratio(row["shared_memory"], row[peer]).median for peer in ("gloo", "mpi"))
        for size, row in rows
        if size > 1 << 12
    )
    return keys


def compare(arguments: argparse.Namespace) -> None:
    """The whole comparison on this host."""
    if shutil.which("mpirun") is None:
        sys.exit("Needs Open MPI's `mpirun`: apt install openmpi-bin.")
    results = {}
    for num_ranks in arguments.ranks:
        results[num_ranks] = launch(num_ranks, arguments)
        show(num_ranks, results[num_ranks], "shared_memory")
    keys = headline(results)
    summary = {
        f"{num_ranks} ranks": {
            f"{size} bytes": {
                name: dict(zip(("median_s", "low_s", "high_s"), interval(seconds), strict=True))
                | {"share_of_copy": ratio(row["copy"], seconds).median}
                for name, seconds in row.items()
            }
            for size, row in rows.items()
        }
        for num_ranks, rows in results.items()
    }
    write_results("bench_allreduce", {"targets": TARGETS, **keys, "rows": summary})
    print_headline(**keys)


def interval(seconds: list[float]) -> tuple[float, float, float]:
    found = estimate(seconds)
    return found.median, found.low, found.high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes; some minutes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, help="default: 15, quick 7")
    parser.add_argument("--sizes", type=int, nargs="+", help="in bytes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (7 if arguments.quick else 15)
    arguments.sizes = arguments.sizes or (QUICK_SIZES_BYTES if arguments.quick else SIZES_BYTES)
    if read_launch().launcher == "none":
        compare(arguments)
    else:
        work(arguments)


if __name__ == "__main__":
    main()
