"""What `attach` and `steps` cost one worker, against the same loop in bare torch.

    python benchmarks/bench_overhead.py [--quick]

A step of the recipe `fashion` (batch 128) with one micro-batch and with four of 32, on random
pictures of the same shape. "tensors": micro-batches cut beforehand, so that only `attach` and
`steps` differ. "loader": `allstep.data.loader` against torch's `DataLoader`, both in the
process. The loops take turns step by step.
"""

import argparse
import copy
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Estimate, estimate, interleave, print_headline, ratio, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import allstep
from allstep.data import GlobalBatch, MicroBatch
from allstep.recipes.fashion import Fashion
from allstep.train import Task

GLOBAL_BATCH = 128
STEPS_PER_EPOCH = 20
WARMUPS = 5
TARGET_PCT = 2.0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Cut:
    """Global batches in memory, cut in micro-batches: what `steps` needs of a loader."""

    batches: list[list[tuple[Tensor, Tensor]]]
    seed: int = 0

    def global_batches(self) -> Iterator[GlobalBatch]:
        for step, parts in enumerate(self.batches):
            micro_batches = (
                MicroBatch(index, len(part[1]), part, index == len(parts) - 1)
                for index, part in enumerate(parts)
            )
            num_samples = sum(len(part[1]) for part in parts)
            yield GlobalBatch(step, 0, num_samples, micro_batches, len(parts), len(parts))


def fashion_task(num_samples: int, **fields: Any) -> Task:
    """The recipe on random pictures, so that nothing needs to be installed."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("train", "t10k"):
            pictures = torch.randint(0, 256, (num_samples, 28, 28), dtype=torch.uint8)
            write_idx(Path(folder) / f"{part}-images-idx3-ubyte", pictures)
            labels = torch.randint(0, 10, (num_samples,), dtype=torch.uint8)
            write_idx(Path(folder) / f"{part}-labels-idx1-ubyte", labels)
        recipe = Fashion(folder=Path(folder), global_batch=GLOBAL_BATCH, **fields)
        return recipe.task(allstep.Communicator.single_process())


def write_idx(path: Path, x: Tensor) -> None:
    """Writes bytes in the format of MNIST: magic number, shape, values."""
    header = struct.pack(f">{1 + x.ndim}i", 0x0800 + x.ndim, *x.shape)
    path.write_bytes(header + x.numpy().tobytes())


def bare_loop(task: Task, model: nn.Module, epoch: Callable[[], Iterable]) -> Iterator[None]:
    """What a user writes without allstep, one step at a time."""
    optimizer = task.optimizer(model)
    while True:
        for parts in epoch():
            for part in parts:
                loss = task.loss(model, part)
                (loss * (len(part[1]) / GLOBAL_BATCH)).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def allstep_loop(task: Task, model: nn.Module, loader: object) -> Iterator[None]:
    """The same with `attach` and `steps`."""
    optimizer = task.optimizer(model)
    exchange = allstep.attach(model, allstep.Communicator.single_process())
    while True:
        for batch in allstep.steps(loader, exchange):
            for part in batch:
                batch.backward(task.loss(model, part))
            optimizer.step()
            optimizer.zero_grad()
            yield


def grouped(loader: DataLoader, num_micro_batches: int) -> Iterator[Iterator]:
    """A `DataLoader`'s micro-batches, so many to a step."""
    iterator = iter(loader)
    for _ in range(len(loader) // num_micro_batches):
        yield (next(iterator) for _ in range(num_micro_batches))


def measure(
    micro_batch: int, repeats: int, clock: Callable[[], float]
) -> dict[str, tuple[Estimate, Estimate]]:
    """Name of the comparison -> seconds of a bare step; allstep's step over the bare one."""
    task = fashion_task(STEPS_PER_EPOCH * GLOBAL_BATCH)
    samples = task.train_set
    parts = list(zip(*(tensor.split(micro_batch) for tensor in samples.tensors), strict=True))
    num_parts = GLOBAL_BATCH // micro_batch
    batches = [parts[i : i + num_parts] for i in range(0, len(parts), num_parts)]
    torch_loader = DataLoader(samples, micro_batch, shuffle=True)
    loader = allstep.data.loader(
        samples,
        allstep.Communicator.single_process(),
        global_batch=GLOBAL_BATCH,
        micro_batch=micro_batch,
    )

    def model() -> nn.Module:
        return copy.deepcopy(task.model)

    loops = {
        "bare tensors": bare_loop(task, model(), lambda: batches),
        "tensors": allstep_loop(task, model(), Cut(batches)),
        "bare loader": bare_loop(task, model(), lambda: grouped(torch_loader, num_parts)),
        "loader": allstep_loop(task, model(), loader),
    }
    seconds = interleave(
        {name: loop.__next__ for name, loop in loops.items()}, repeats, warmups=WARMUPS, clock=clock
    )
    return {
        name: (estimate(seconds[f"bare {name}"]), ratio(seconds[name], seconds[f"bare {name}"]))
        for name in ("tensors", "loader")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about a minute on two cores")
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own choice")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu on a busy machine")
    arguments = parser.parse_args()
    clock = CLOCKS[arguments.clock]
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    repeats = 60 if arguments.quick else 400

    table = Table("micro-batches", "against", "bare step, ms", "overhead, %", title="One worker")
    results = {}
    for micro_batch in (GLOBAL_BATCH, GLOBAL_BATCH // 4):
        for name, (bare_s, slower) in measure(micro_batch, repeats, clock).items():
            num_micro_batches = GLOBAL_BATCH // micro_batch
            cost_pct = slower.excess()
            row = f"{cost_pct.median:.2f} [{cost_pct.low:.2f}, {cost_pct.high:.2f}]"
            table.add_row(str(num_micro_batches), name, f"{1e3 * bare_s.median:.2f}", row)
            results[f"{name}_{num_micro_batches}"] = {
                "bare_step_s": bare_s.median,
                "overhead_pct": cost_pct.median,
                "interval_pct": [cost_pct.low, cost_pct.high],
            }
    Console().print(table)
    worst_pct = max(result["overhead_pct"] for result in results.values())
    path = write_results(
        "bench_overhead",
        {"clock": arguments.clock, "repeats": repeats, "target_pct": TARGET_PCT, "rows": results},
    )
    print(f"target: at most {TARGET_PCT} %; written to {path.name}")
    print_headline(overhead_pct=worst_pct)


if __name__ == "__main__":
    main()
