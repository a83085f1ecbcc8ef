"""Steps of a compiled model on one rank of several; started by bench_compile.

    python benchmarks/compile_worker.py FILE.measured REPEATS      # as a rank

The variants take turns in the same processes. "alone" exchanges nothing; DDP cuts a compiled model
where its buckets end, by torch's own `optimize_ddp`.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from common import run_worker
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import allstep
from allstep import Communicator

WIDTH, HEADS, NUM_BLOCKS, BATCH, LENGTH = 256, 4, 8, 4, 64
WARMUPS = 6  # compiles; buckets are made anew after the first


class Block(nn.Module):
    """Attention and a perceptron, each after a layer norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def make(variant: str, comm: Communicator) -> nn.Module:
    """The module to call, whose backward pass exchanges."""
    exchange, compiled = variant.split()
    model: nn.Module = make_model()
    if exchange == "attach":
        allstep.attach(model, comm)
    elif exchange == "ddp":
        model = DistributedDataParallel(model)
    if compiled == "blocks":
        for block in model.children():
            block.compile()
    return torch.compile(model) if compiled == "whole" else model  # type: ignore[return-value]


VARIANTS = [
    f"{exchange} {compiled}"
    for exchange in ("alone", "attach", "ddp")
    for compiled in ("eager", "whole", "blocks")
    if (exchange, compiled) != ("ddp", "blocks")
]


def stepper(model: nn.Module) -> Callable[[], None]:
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    return step


def measure(comm: Communicator, repeats: int) -> dict[str, list[float]]:
    """Variant -> seconds of a step in each repeat."""
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    steps = {variant: stepper(make(variant, comm)) for variant in VARIANTS}
    for step in steps.values():
        for _ in range(WARMUPS):
            step()
    for repeat in range(repeats):
        for variant in VARIANTS if repeat % 2 else reversed(VARIANTS):
            comm.barrier()
            start_s = time.perf_counter()
            steps[variant]()
            seconds[variant].append(time.perf_counter() - start_s)
    return seconds


def main() -> None:
    run_worker(lambda comm: measure(comm, repeats=int(sys.argv[2])), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
