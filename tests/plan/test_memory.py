"""The memory that workers of tensor parallelism and of a pipeline take in a step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from allstep import Communicator
from allstep.nn import Pipeline, tensor_parallel
from allstep.plan import PipelineSpec, TransformerSpec, Workload, memory_of
from allstep.plan.memory import memory_of_workers
from allstep.recipes.token_loss import summed_cross_entropy
from allstep.recipes.transformer import (
    Transformer,
    TransformerConfig,
    TransformerStage,
    tensor_parallel_plan,
)
from tests.helpers.processes import run_processes
from tests.helpers.resident import Step, peak_bytes

SPEC = TransformerSpec(depth=4, width=384, heads=4, sequence_length=64)
CONFIG = TransformerConfig(
    vocab_size=8000, sequence_length=64, width=384, depth=4, heads=4, dropout=0.1, causal=True
)
BATCH, NUM_MICRO_BATCHES = 6, 3  # more than stages: activations are there beside gradients
NUM_PARAMS = SPEC.depth * SPEC.block_params(1) + (8000 + 64 + 2) * SPEC.width
MICRO = Workload.from_step(num_params=NUM_PARAMS, step_s=1.0, num_samples=BATCH)


def micro_batches(config: TransformerConfig) -> list[Tensor]:
    shape = (NUM_MICRO_BATCHES, BATCH, config.sequence_length)
    return list(torch.arange(torch.Size(shape).numel()).remainder(config.vocab_size).view(shape))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return summed_cross_entropy(logits.flatten(0, 1), tokens.flatten()) / tokens.numel()


def divided(comm: Communicator, config: TransformerConfig) -> Step:
    """A step of a transformer whose layers are divided over the workers."""
    model = Transformer(config)
    if comm.size > 1:
        tensor_parallel(model, comm.mesh(data=1, tensor=comm.size), tensor_parallel_plan(model))
    optimizer, batches = adamw(model), micro_batches(config)

    def step() -> None:
        for tokens in batches:
            loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_stages(comm: Communicator, config: TransformerConfig) -> Step:
    """A step of a transformer whose blocks lie on the workers one after the other."""
    model = Pipeline(
        [partial(TransformerStage, config, number) for number in range(config.depth)],
        comm.mesh(data=1, pipeline=comm.size),
        loss=lambda logits, batch: loss_of(logits, batch[0]),
    )
    optimizer, batches = adamw(model), [(tokens,) for tokens in micro_batches(config)]

    def step() -> None:
        model.run(batches)
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def measured(comm: Communicator, make: Callable[[Communicator, TransformerConfig], Step]) -> int:
    small = replace(CONFIG, width=8, depth=2, vocab_size=64)
    return peak_bytes(partial(make, comm, small), partial(make, comm, CONFIG))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_memory_is_what_a_divided_transformer_takes(size: int) -> None:
    predicted = memory_of(MICRO, SPEC, size).total
    for found in run_processes(size, measured, divided):
        assert predicted == pytest.approx(found, rel=0.1)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_memory_is_what_workers_of_a_pipeline_take(size: int) -> None:
    stages = PipelineSpec(transformer=SPEC, num_workers=size)
    predicted = [m.total for m in memory_of_workers(MICRO, stages, 1, 2, NUM_MICRO_BATCHES)]
    if size == 1:
        predicted[0] += 16 * 8000 * SPEC.width  # its logits' matrix is not the embeddings'
    for total, found in zip(predicted, run_processes(size, measured, in_stages), strict=True):
        assert total == pytest.approx(found, rel=0.1)
