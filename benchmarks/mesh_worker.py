"""A step of a transformer that torch divides over workers: with allstep, bare, and whole.

python benchmarks/mesh_worker.py FILE ENGINE WIDTH NUM_DATA REPEATS CLOCK   # as a rank
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from bench_overhead import CLOCKS, Cut
from common import interleave, run_worker
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import allstep
from allstep import Communicator
from allstep.comm import Mesh
from allstep.nn import tensor_parallel
from allstep.recipes.token_loss import summed_cross_entropy
from allstep.recipes.transformer import Transformer, TransformerConfig
from allstep.recipes.transformer_parallel import shard_blocks, tensor_parallel_plan

VOCAB, TOKENS, MICRO_BATCH, NUM_MICRO_BATCHES = 2048, 64, 16, 2  # as `text`, on each data worker
STEPS_PER_EPOCH = 20

Loop = Iterator[None]


def make_model(width: int) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=VOCAB,
        sequence_length=TOKENS,
        width=width,
        depth=4,
        heads=4,
        dropout=0.1,
        causal=True,
    )
    return Transformer(config)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    targets = tokens.roll(-1, 1).flatten()
    return summed_cross_entropy(model(tokens).flatten(0, 1), targets) / len(targets)


def bare_loop(
    engine: str, mesh: Mesh[Communicator], width: int, batches: list[list[Tensor]], updates: bool
) -> Loop:
    """What a user of torch writes: DTensors as parameters, and the mean over the data axis."""
    model, of_torch = make_model(width), mesh.device_mesh()
    if "tensor" in engine:
        parallelize_module(model, of_torch["tensor"], tensor_parallel_plan(model))
    if "fsdp" in engine:
        shard_blocks(model, of_torch["data"])
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        for batch in batches:
            for tokens in batch:
                (loss_of(model, tokens) / len(batch)).backward()
            if mesh["data"].size > 1 and "fsdp" not in engine:
                average(model, of_torch["data"].get_group())
            if updates:
                optimizer.step()
            optimizer.zero_grad()
            yield


def average(model: nn.Module, group: dist.ProcessGroup) -> None:
    """One flat message, as a plain loop without DDP has it."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in found]
    flat = torch.cat([g.reshape(-1) for g in local])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    for gradient, part in zip(local, flat.split([g.numel() for g in local]), strict=True):
        gradient.copy_(part.view_as(gradient))


def allstep_loop(
    engine: str, mesh: Mesh[Communicator], width: int, batches: list[list[Tensor]], updates: bool
) -> Loop:
    """The same with `attach` and `steps`."""
    model = make_model(width)
    if "tensor" in engine:
        tensor_parallel(model, mesh, tensor_parallel_plan(model))
    if "fsdp" in engine:
        shard_blocks(model, mesh.device_mesh()["data"])
    optimizer = torch.optim.AdamW(model.parameters())
    exchange = allstep.attach(model, mesh["data"])
    pairs = Cut([[(tokens, tokens) for tokens in batch] for batch in batches])
    while True:
        for batch in allstep.steps(pairs, exchange):
            for tokens, _ in batch:
                batch.backward(loss_of(model, tokens))
            if updates:
                optimizer.step()
            optimizer.zero_grad()
            yield


def measure(
    comm: Communicator,
    engine: str,
    width: int,
    num_data: int,
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Variant -> seconds of a step on this rank; variants take turns step by step."""
    mesh = comm.mesh(data=num_data, tensor=comm.size // num_data)
    torch.manual_seed(mesh["data"].rank)
    batches = [
        [torch.randint(VOCAB, (MICRO_BATCH, TOKENS)) for _ in range(NUM_MICRO_BATCHES)]
        for _ in range(STEPS_PER_EPOCH)
    ]
    loops = {
        f"{name} {part}": loop(engine, mesh, width, batches, part == "step")
        for part in ("step", "gradients")
        for name, loop in (("bare", bare_loop), ("allstep", allstep_loop))
    }
    loops["whole step"] = bare_loop("none", mesh, width, batches, True)
    steps: dict[str, Callable[[], object]] = {name: loop.__next__ for name, loop in loops.items()}
    return interleave(steps, repeats, warmups=6, clock=clock)


def main() -> None:
    file, engine, *numbers, clock = sys.argv[1:]
    run_worker(lambda comm: measure(comm, engine, *map(int, numbers), CLOCKS[clock]), Path(file))


if __name__ == "__main__":
    main()
