"""Steps of the recipe `fashion` with exact and with plain sums, which take turns.

    python benchmarks/exact_worker.py FILE.measured REPEATS      # as a rank

Random pictures; global batches of 128 in micro-batches of 32, cut beforehand.
"""

import copy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_overhead import Cut, fashion_task
from common import run_worker

import allstep
from allstep import Communicator, Synchronous
from allstep.data import GlobalBatch, MicroBatch
from allstep.train import Task

GLOBAL_BATCH, MICRO_BATCH, STEPS = 128, 32, 16
WARMUPS = 2  # epochs


class Shared(Cut):
    """The global batches, of which each worker gets its part."""

    comm: Communicator

    def global_batches(self) -> Iterator[GlobalBatch]:
        rank, size = self.comm.rank, self.comm.size
        for step, parts in enumerate(self.batches):
            mine = range(rank * len(parts) // size, (rank + 1) * len(parts) // size)
            micro_batches = (MicroBatch(i, len(parts[i][1]), parts[i], i == mine[-1]) for i in mine)
            yield GlobalBatch(step, 0, GLOBAL_BATCH, micro_batches, len(mine), len(parts))


def measure(comm: Communicator, repeats: int) -> dict[str, list[float]]:
    """Compression -> seconds of a step, of the slowest rank, in each repeat."""
    task = fashion_task(STEPS * GLOBAL_BATCH)
    parts = list(zip(*(x.split(MICRO_BATCH) for x in task.train_set.tensors), strict=True))
    num = GLOBAL_BATCH // MICRO_BATCH
    batches = Shared([parts[i : i + num] for i in range(0, len(parts), num)])
    batches.comm = comm
    loops = {name: epochs(task, comm, batches, name) for name in ("fp32", "exact")}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(-WARMUPS, repeats):
        for name in list(loops) if repeat % 2 else list(reversed(loops)):
            comm.barrier()
            start_s = time.perf_counter()
            next(loops[name])
            own_s = torch.tensor((time.perf_counter() - start_s) / STEPS, dtype=torch.float64)
            if repeat >= 0:
                seconds[name].append(float(comm.all_reduce(own_s, "max")))
    return seconds


def epochs(task: Task, comm: Communicator, batches: Shared, compression: str) -> Iterator[None]:
    """An epoch at a time."""
    model = copy.deepcopy(task.model)
    optimizer = task.optimizer(model)
    exchange = allstep.attach(model, comm, Synchronous(compression=compression))
    while True:
        for batch in allstep.steps(batches, exchange):
            for part in batch:
                batch.backward(task.loss(model, part))
            optimizer.step()
            optimizer.zero_grad()
        yield


def main() -> None:
    torch.manual_seed(0)
    run_worker(lambda comm: measure(comm, int(sys.argv[2])), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
