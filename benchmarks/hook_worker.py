"""What a parameter's hook costs in the backward pass, under allstep and under DDP.

    python benchmarks/hook_worker.py FILE.measured      # as a rank; started by bench_exchange

Models of many small parameters and of few differ by so many hooks; the time is what the thread that
runs the backward pass spends on the processor, so that neither waiting nor other processes count.
"""

import sys
import time
from pathlib import Path

import torch
from common import run_worker
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import allstep
from allstep import Communicator

FEW, MANY = 200, 1_200  # parameters
VARIANTS = ("alone", "ddp", "ddp view", "allstep")


class Small(nn.Module):
    """A sum over many small parameters."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.small = nn.ParameterList(torch.zeros(16) for _ in range(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([p.sum() for p in self.small]).sum() * x


def make(variant: str, num_parameters: int, comm: Communicator) -> nn.Module:
    model = Small(num_parameters)
    if variant == "allstep":
        allstep.attach(model, comm)
    elif variant != "alone":
        return DistributedDataParallel(model, gradient_as_bucket_view=variant == "ddp view")
    return model


def backward_s(model: nn.Module, comm: Communicator) -> float:
    model.zero_grad()
    loss = model(torch.ones(()))
    comm.barrier()
    start_s = time.thread_time()
    loss.backward()
    return time.thread_time() - start_s


def measure(comm: Communicator, repeats: int) -> dict[str, list[float]]:
    """Variant -> microseconds that each parameter adds to a backward pass without exchange."""
    models = {(v, n): make(v, n, comm) for v in VARIANTS for n in (FEW, MANY)}
    microseconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(repeats):
        best_s = {key: min(backward_s(m, comm) for _ in range(8)) for key, m in models.items()}
        for variant in VARIANTS:
            slope_s = (best_s[variant, MANY] - best_s[variant, FEW]) / (MANY - FEW)
            microseconds[variant].append(1e6 * slope_s)
    alone = microseconds.pop("alone")
    return {v: [a - b for a, b in zip(x, alone, strict=True)] for v, x in microseconds.items()}


def main() -> None:
    run_worker(lambda comm: measure(comm, repeats=int(sys.argv[2])), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
