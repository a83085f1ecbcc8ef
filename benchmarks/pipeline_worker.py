"""A global batch through a pipeline whose stages sleep.

python benchmarks/pipeline_worker.py FILE SCHEDULE MICRO_BATCHES REPEATS  # by bench_pipeline
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import run_worker
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import allstep
from allstep import Communicator
from allstep.nn import Pipeline

FORWARD_S, BACKWARD_S = 0.2, 0.4  # of a worker's stages for a micro-batch
STAGES_EACH = 2  # of a worker, between which "interleaved" takes turns
WIDTH = 8


class Clock:
    """Seconds that a worker's stages have slept, which on a busy machine is longer than asked."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        start_s = time.perf_counter()
        time.sleep(seconds)
        self.slept_s += time.perf_counter() - start_s


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.sleep(FORWARD_S / STAGES_EACH)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.clock.sleep(BACKWARD_S / STAGES_EACH)
        return gradients[0], None


class Stage(nn.Module):
    """A layer, and the time that a large one would take."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._clock = clock

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(self.layer(x), self._clock)  # type: ignore[no-untyped-call]
        return slept


def measure(
    comm: Communicator, schedule: Any, num_micro_batches: int, repeats: int
) -> list[tuple[float, float]]:
    """Seconds from when all begin with a global batch to when all are done; a worker's at work."""
    clock = Clock()
    mesh = comm.mesh(data=1, pipeline=comm.size)
    model = Pipeline(
        [lambda: Stage(clock)] * (STAGES_EACH * comm.size),
        mesh,
        loss=lambda y, batch: (y - batch[1]).square().mean(),
        schedule=schedule,
    )
    exchange = allstep.attach(model, mesh["data"])
    num = num_micro_batches * (1 + repeats)
    samples = TensorDataset(*(torch.ones(num, WIDTH) for _ in range(2)))
    found = []
    with allstep.data.loader(
        samples, mesh["data"], global_batch=num_micro_batches, micro_batch=1
    ) as loader:
        for batch in allstep.steps(loader, exchange):
            comm.barrier()
            start_s, slept_s = time.perf_counter(), clock.slept_s
            batch.run(model)
            comm.barrier()
            step_s = time.perf_counter() - start_s
            of_all = comm.all_reduce(torch.tensor(clock.slept_s - slept_s))
            found.append((step_s, float(of_all) / comm.size))
    return found[1:]  # the first has found out shapes


def main() -> None:
    file, schedule, *numbers = sys.argv[1:]
    run_worker(lambda comm: measure(comm, schedule, *map(int, numbers)), Path(file))


if __name__ == "__main__":
    main()
